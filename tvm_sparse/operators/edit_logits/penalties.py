"""The penalties of words that were seen."""

# Their names, and what kernels call arrays of them, with one for each row.
PENALTIES = {"repetition": "repetitions", "presence": "presences", "frequency": "frequencies"}
