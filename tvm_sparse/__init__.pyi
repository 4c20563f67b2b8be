# Written by scripts/stub.py from core/registry.py.

from .operators.bsr_matmul.call import BsrWeight as BsrWeight
from .operators.bsr_matmul.call import bsr_matmul as bsr_matmul
from .operators.compaction.call import compaction as compaction
from .operators.logsumexp.call import logsumexp as logsumexp
from .operators.lsh_candidates.call import lsh_candidates as lsh_candidates
from .operators.lsh_lookup.call import lsh_lookup as lsh_lookup
from .operators.nhot_lookup.call import CsrRows as CsrRows
from .operators.nhot_lookup.call import nhot_lookup as nhot_lookup
from .operators.softmax.call import log_softmax as log_softmax
from .operators.softmax.call import softmax as softmax
from .operators.softmax_topk.call import softmax_topk as softmax_topk
from .operators.wta_hash.call import wta_hash as wta_hash
from .runtime.dispatch import Explanation as Explanation
from .runtime.dispatch import explain as explain
from .runtime.dispatch import load as load
