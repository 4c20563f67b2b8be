"""The second kernel of the output layer's templates on GPUs: the k best tokens of a row, of its best tiles or of all.

The k best tokens of a row lie in the k tiles whose best tokens are the best: if a token is among the k best and its
tile is not among these, there are k better tokens. So a thread block a row finds the best tiles, reads their scores
again, and finds the k best tokens. The k-th largest of the maxima of groups of threads is a bound that k tiles reach at
least, and with them k tokens: what is below it counts neither among tiles nor among tokens. The tokens that reach it,
few more than k, are ranked by counting. Where more tiles or tokens reach it, as with many equal scores, the k best
tiles are found by counting first, and then a bound for tokens of their own. Keys are unique (see `device.selection`),
so that the result does not depend on who comes first, and no input makes the selection fail. Where each thread has the
largest scores of all its tiles in registers, as with the exact head, tiles are found by these alone, without keys
(`collect_bits`): the bound is the k-th best of the groups' tops (`rows.best`). With `direct` all scores of a short
list are searched in this way, which saves a trip to memory, and the first kernel stores nothing but scores.
"""
