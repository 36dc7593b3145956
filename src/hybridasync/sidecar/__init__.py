"""One small HTTP process beside each engine: owns its life, its pause ledger and its lease."""
