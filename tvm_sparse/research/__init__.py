"""Studies of recorded trials: tables, statistics, simulated search, plots. Needs no GPU and compiles nothing."""
