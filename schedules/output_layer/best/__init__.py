"""The last kernel of the output layer on GPUs: a thread block for each row finds the row's k best tokens.

They lie in the k tiles with the best largest scores: if a token is among the k best and its tile is not among these,
there are k better tokens. So the thread block

1. finds a bound, the k-th largest of the maxima of groups of tiles: at least k tiles reach it, and with them k tokens;
2. reads the scores of the tiles that reach the bound, and collects the tokens that reach it, few more than k;
3. ranks these by counting.

Where more tiles or tokens reach the bound than there is room for, as with many equal scores, the k best tiles are found
by counting, and then a bound for their tokens alone. Keys are unique (see `device.selection`), so that the result does
not depend on the order of threads, and no input makes the selection fail.

If each thread has the largest scores of all its tiles in registers, as with the exact head, tiles are found by these
scores without keys (`collect_bits`, and `rows.best`). With `direct` all scores of a short list are searched like tiles.
That saves a trip to memory, and the kernel before stores nothing but scores.
"""
