"""Pure machines: decisions without clock, chance or I/O."""
