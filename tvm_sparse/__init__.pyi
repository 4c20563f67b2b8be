# Written by scripts/stub.py from core/registry.py.

from .operators.bsr_matmul.call import BsrWeight as BsrWeight
from .operators.bsr_matmul.call import bsr_matmul as bsr_matmul
from .operators.candidate_logits.call import candidate_logits as candidate_logits
from .operators.candidate_topk.call import candidate_topk as candidate_topk
from .operators.head_topk.call import head_topk as head_topk
from .operators.logsumexp.call import logsumexp as logsumexp
from .operators.nhot_lookup.call import CsrRows as CsrRows
from .operators.nhot_lookup.call import nhot_lookup as nhot_lookup
from .operators.softmax.call import log_softmax as log_softmax
from .operators.softmax.call import softmax as softmax
from .operators.softmax_topk.call import softmax_topk as softmax_topk
from .runtime.dispatch import Explanation as Explanation
from .runtime.dispatch import explain as explain
from .runtime.dispatch import load as load
