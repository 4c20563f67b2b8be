"""A recurrent layer with sparse recurrent weights: all steps of a sequence in one call."""
