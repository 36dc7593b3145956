"""The virtual world: real drivers and real sidecar logic on a virtual clock, with a faulty network. Needs trio."""
