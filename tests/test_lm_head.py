"""The module in the place of a model's lm_head, with small randomly initialised models of transformers, on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tvm_sparse  # noqa: E402

VOCAB, HIDDEN = 300, 32
EOS = 1
SMALL: dict[str, Any] = {"k": 8, "units": 2, "bands": 64, "threshold": 4, "frequent": 10, "capacity": 256}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": EOS}


def model(kind: str = "gpt2", seed: int = 0) -> Any:
    """GPT-2 ties its embeddings, this Llama does not."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=EOS
        )
        made = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
        made = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            made.lm_head.weight.mul_(40)  # so that words are told apart
    return made.eval()


def prompts(rows: int = 3) -> Any:
    return torch.randint(2, VOCAB, (rows, 5))


def generated(made: Any, ids: Any, **options: Any) -> Any:
    return made.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | options)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_decoding_by_the_exact_path_is_the_original_s(kind: str) -> None:
    made, ids = model(kind), prompts()
    wanted, state = generated(made, ids), copy.deepcopy(made.state_dict())
    module = tvm_sparse.LmHead.replace(made, path="exact", **SMALL)
    assert made.get_output_embeddings() is module
    assert torch.equal(generated(made, ids), wanted) and module.counts is None
    assert list(made.state_dict()) == list(state) and all(map(torch.equal, made.state_dict().values(), state.values()))
    made.load_state_dict(state)
    if kind == "gpt2":
        assert module.weight is made.transformer.wte.weight
    made.set_output_embeddings(module.linear())
    assert torch.equal(generated(made, ids), wanted)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_decoding_by_hashes_follows_the_candidates(kind: str) -> None:
    """Each step takes the best of the candidates, which is the best of all where that is among them."""
    made, ids = model(kind), prompts()
    original = copy.deepcopy(made)
    module = tvm_sparse.LmHead.replace(made, **SMALL)
    found = generated(made, ids, output_logits=True, return_dict_in_generate=True)
    followed = 0
    for step, logits in enumerate(found.logits):
        before = found.sequences[:, : ids.shape[1] + step]
        with torch.no_grad():
            full = original(before).logits[:, -1]
        kept = logits > -float("inf")
        assert 0 < kept.sum() < kept.numel()
        assert torch.allclose(logits[kept], full[kept].to(logits.dtype), atol=1e-4)
        best = full.argmax(1)
        there = kept.gather(1, best[:, None])[:, 0]
        assert torch.equal(logits.argmax(1)[there], best[there])
        followed += int(there.sum())
    assert followed and module.counts.shape == (3,)


def test_logits_are_those_of_the_candidates() -> None:
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))
    bias = torch.nn.Parameter(torch.randn(VOCAB))
    module = tvm_sparse.LmHead(weight, bias, beam=2, **SMALL)
    hidden = torch.randn(3, 4, HIDDEN)
    with torch.no_grad():
        logits = module(hidden)
        full = torch.nn.functional.linear(hidden, weight, bias)
    assert logits.shape == (3, 4, VOCAB) and logits.dtype == hidden.dtype and module.counts.shape == (6,)
    log_probs, words, _ = module.head.log_softmax(hidden.reshape(12, HIDDEN), sentences=6)
    for row, found in enumerate(logits.reshape(12, VOCAB)):
        kept = words[row // 2][words[row // 2] >= 0].long()
        assert torch.equal((found > -float("inf")).nonzero()[:, 0], kept)
        assert torch.allclose(found[kept], full.reshape(12, VOCAB)[row, kept], atol=1e-4)
        assert torch.allclose(found.log_softmax(0)[kept], log_probs[row, : len(kept)], atol=1e-4)
    with torch.no_grad():
        # Seven rows are no pairs: a list each. Too many lists, or none: the product.
        assert module(hidden.reshape(12, HIDDEN)[:7]).shape == (7, VOCAB) and module.counts.shape == (7,)
        module.exact_above = 5
        assert torch.equal(module(hidden), full) and module.counts is None
        assert module(hidden[:0]).shape == (0, 4, VOCAB)


def test_beam_search_and_sampling_of_transformers() -> None:
    made, ids = model("llama"), prompts(2)
    module = tvm_sparse.LmHead.replace(made, beam=3, **SMALL)
    found = generated(made, ids, num_beams=3)
    assert found.shape[0] == 2 and module.counts.shape == (2,)
    torch.manual_seed(1)
    found = generated(made, ids, do_sample=True, top_k=5)
    assert ((found >= 0) & (found < VOCAB)).all()


def test_a_module_moves_with_its_model() -> None:
    made, ids = model("llama"), prompts()
    module = tvm_sparse.LmHead.replace(made, **SMALL)
    made.to(torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16 and module.head.embedding.dtype is torch.bfloat16
    assert module.words.dtype is torch.int32 and not any("words" in name for name in made.state_dict())
    assert generated(made, ids).shape[1] > ids.shape[1]
    # A model that ties weights again puts another parameter there.
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    with torch.no_grad():
        module(torch.randn(1, HIDDEN, dtype=torch.bfloat16))
    assert module.head.embedding.data_ptr() == module.weight.data_ptr()
    # After training, hashes are made anew.
    before = module.words
    with torch.no_grad():
        module.weight.neg_()
    module.rebuild()
    assert not torch.equal(before, module.words)
    assert "threshold=4" in repr(made)


def test_gradients_flow_through_the_product() -> None:
    made, ids = model("llama"), prompts()
    module = tvm_sparse.LmHead.replace(made, **SMALL)
    made(ids, labels=ids).loss.backward()
    assert module.weight.grad is not None and module.weight.grad.abs().sum() > 0


def test_threshold_0_computes_all_logits() -> None:
    made, ids = model(), prompts()
    wanted = generated(made, ids)
    tvm_sparse.LmHead.replace(made, threshold=0)
    assert torch.equal(generated(made, ids), wanted)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "auto"}, ValueError, "path: expected one of lsh, exact, quantized, got 'auto'"),
        ({"beam": 0}, ValueError, "beam: expected at least 1, got 0"),
        ({"threshold": 99}, ValueError, r"threshold: expected 0 <= threshold <= bands \(64\), got 99"),
        ({"head_dim": 3}, TypeError, "head_dim"),
    ],
)
def test_what_cannot_be_replaced(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tvm_sparse.LmHead.replace(model(), **SMALL | options)
    with pytest.raises(TypeError, match="weight: expected a torch.nn.Parameter, got Tensor"):
        tvm_sparse.LmHead(torch.randn(VOCAB, HIDDEN), **SMALL)
    with pytest.raises(TypeError, match="model: expected output embeddings that are a torch.nn.Linear, got NoneType"):
        tvm_sparse.LmHead.replace(torch.nn.Linear(2, 2))


@pytest.mark.gpu
def test_a_module_on_the_gpu() -> None:
    made, ids = model("llama"), prompts()
    tvm_sparse.LmHead.replace(made, **SMALL)
    wanted = generated(made, ids)
    made.cuda()
    assert torch.equal(generated(made, ids.cuda()).cpu(), wanted)
