"""Client of the served model; needs tritonclient and numpy only."""
