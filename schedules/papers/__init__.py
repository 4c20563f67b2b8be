"""The papers' own schedules, as literature: what each says, in a file or folder beside its section.

| paper and section | here | templates |
| --- | --- | --- |
| Gu 2020, 4.1 and 4.2 | `gu_elements` | `per_element`, `per_tile` |
| Gu 2020, 4.4 | `gu_reductions` | `over_blocks`, `cross_thread`, `warp_shuffle` |
| Milakov & Gimelshein 2018, Algorithm 4 | `milakov_gimelshein` | `safe_then_topk`, `safe_fused`, `online_insertion` |
| Argueta & Chiang 2019, Algorithm 2 | `argueta_chiang_lookup` | `lookup_elements` |
| Argueta & Chiang 2019, Algorithm 4 | `argueta_chiang_topk` | `packed_insertion` |

They belong to the `TEMPLATES` of their operators, `bsr_matmul`, `softmax_topk` and `nhot_lookup`, as all others do.
Schedules of two papers share phases with templates that win, and stand there: those of Zhu, Pool et al. 2018 in
`sparse_recurrent/persistent_rows` (`barrier_rows`), those of Shi, Xu & Knight 2018 in `lsh/naive.py` (`plain_steps`,
`global_counts`, `copy_if`).

Operators' packages import this one, so nothing here imports them before a function is called.
"""
