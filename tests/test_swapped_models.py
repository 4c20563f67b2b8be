"""Layers in the place of PyTorch's, of models that others wrote: pruned, parametrized, or of classes of one's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.layers.modules import effective
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

nn = tvm_sparse.nn


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run((), tmp_path_factory.mktemp("kernels")) as own:
        yield own


def close(have: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)


# ---- pruned and parametrized ---------------------------------------------------------------------


class Halved(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x / 2


def _twice(module: Any, name: str) -> None:
    prune.random_unstructured(module, name, 0.3)
    prune.l1_unstructured(module, name, 0.2)


def _old(call: Any) -> Any:
    def made(module: Any, name: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are old
            call(module, name)

    return made


# What makes a module's tensor of others.
WAYS: dict[str, Any] = {
    "none": lambda module, name: None,
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 0.5),
    "pruned twice": _twice,
    "structured": lambda module, name: prune.ln_structured(module, name, 0.5, n=2, dim=0),
    "parametrized": lambda module, name: parametrize.register_parametrization(module, name, Halved()),
    "weight norm": lambda module, name: parametrizations.weight_norm(module, name),
    "spectral norm": lambda module, name: parametrizations.spectral_norm(module, name),
    "old weight norm": _old(torch.nn.utils.weight_norm),
    "old spectral norm": _old(torch.nn.utils.spectral_norm),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def step(module: Any, *given: Any) -> None:
    """A step of training after the last call: what the call computed with is the weight of the step before."""
    module.train()
    found = module(*given)
    (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * 0.3 * parameter.abs().mean()
    module.eval()


@EACH_WAY
def test_what_a_linear_layer_computes_with_is_taken(way: str) -> None:
    linear, x = torch.nn.Linear(12, 8), torch.randn(5, 12)
    WAYS[way](linear, "weight")
    step(linear, x)
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    made = nn.BsrLinear.from_dense(linear, 4)
    model = torch.nn.Sequential(linear)
    swapped = nn.sparsify(model, block=4, sparsity=None)
    assert list(swapped) == ["0"] and not swapped.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in linear.state_dict().items())
    with torch.no_grad():
        close(made(x), linear(x))
        close(model(x), linear(x))
    assert made.data.requires_grad and made.bias.requires_grad
    linear.requires_grad_(False)
    assert not nn.BsrLinear.from_dense(linear, 4).data.requires_grad


def test_a_pruned_bias_counts() -> None:
    linear, x = torch.nn.Linear(12, 8), torch.randn(5, 12)
    prune.l1_unstructured(linear, "bias", 0.5)
    step(linear, x)
    close(nn.BsrLinear.from_dense(linear, 4)(x), linear(x))


@EACH_WAY
def test_what_a_bag_computes_with_is_taken(way: str) -> None:
    bag, given = torch.nn.EmbeddingBag(20, 6, mode="sum"), (torch.randint(20, (4, 3)),)
    WAYS[way](bag, "weight")
    step(bag, *given)
    made = nn.NHotEmbeddingBag.from_torch(bag)
    assert (made.weight is bag.weight) == (way == "none") and made.weight.requires_grad
    close(made(*given), bag(*given))


@EACH_WAY
@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l1", "weight_hh_l1"])
def test_what_a_recurrent_module_computes_with_is_taken(name: str, way: str) -> None:
    module, x = torch.nn.LSTM(6, 8, num_layers=2), torch.randn(4, 3, 6)
    WAYS[way](module, name)
    if way == "old weight norm":
        module.flatten_parameters()
    step(module, x)
    with torch.no_grad():
        made = tvm_sparse.from_torch(module)
        close(made(x)[0], module(x)[0])


@EACH_WAY
def test_what_an_output_layer_computes_with_is_taken(way: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(16, 60)

        def get_output_embeddings(self) -> Any:
            return self.head

        def set_output_embeddings(self, head: Any) -> None:
            self.head = head

        def forward(self, x: Any) -> Any:
            return self.head(x)

    model, x = Model(), torch.randn(3, 16)
    WAYS[way](model.head, "weight")
    step(model, x)
    with torch.no_grad():
        wanted, weight = model(x), effective(model.head, "weight")
        made = tvm_sparse.LmHead.replace(model, k=8, units=2, bands=64, threshold=1, frequent=60, capacity=60)
        assert torch.equal(made.weight, weight)
        close(model(x), wanted)


def test_pruned_layers_that_share_a_weight_stay() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(8, 8), "other": torch.nn.Linear(8, 8)})
    for layer in model.values():
        prune.l1_unstructured(layer, "weight", 0.5)
    model["other"].weight_orig = model["one"].weight_orig
    found = nn.sparsify(model, block=4)
    assert not found and set(found.skipped.values()) == {"it shares its weight with another module"}


# ---- classes of one's own ------------------------------------------------------------------------


def subclass(base: Any, own: bool) -> Any:
    def forward(self: Any, *given: Any, **more: Any) -> Any:
        return base.forward(self, *given, **more)

    return type(f"My{base.__name__}", (base,), {"forward": forward} if own else {})


TAKEN = {
    torch.nn.Linear: (lambda kind: kind(8, 8), lambda module: nn.BsrLinear.from_dense(module, 4)),
    torch.nn.EmbeddingBag: (lambda kind: kind(8, 8), lambda module: nn.NHotEmbeddingBag.from_torch(module)),
    torch.nn.LSTM: (lambda kind: kind(8, 8), tvm_sparse.from_torch),
    torch.nn.GRU: (lambda kind: kind(8, 8), tvm_sparse.from_torch),
    torch.nn.RNN: (lambda kind: kind(8, 8), tvm_sparse.from_torch),
}


@pytest.mark.parametrize("base", TAKEN)
def test_a_forward_of_one_s_own_is_not_thrown_away(base: Any) -> None:
    make, take = TAKEN[base]
    assert take(make(subclass(base, own=False))) is not None
    with pytest.raises(TypeError, match=f"My{base.__name__} has a forward of its own, which no layer here computes; "):
        take(make(subclass(base, own=True)))
    patched = make(base)
    patched.forward = patched.forward
    with pytest.raises(TypeError, match=f"{base.__name__} has a forward of its own, set on the module"):
        take(patched)


def test_sparsify_says_what_it_leaves() -> None:
    tied = torch.nn.Embedding(16, 16)
    model = torch.nn.ModuleDict(
        {
            "taken": torch.nn.Linear(16, 16),
            "odd": torch.nn.Linear(15, 16),
            "own": subclass(torch.nn.Linear, own=True)(16, 16),
            "sub": subclass(torch.nn.Linear, own=False)(16, 16),
            "tied": torch.nn.Linear(16, 16, bias=False),
            "embedding": tied,
            "attention": torch.nn.MultiheadAttention(16, 2),
        }
    )
    model["tied"].weight = tied.weight
    found = nn.sparsify(model, block=8, sparsity=0.5)
    assert list(found) == ["taken"] and found.skipped == {
        "odd": "blocks of 8x8 do not divide its shape (16, 15); pad=True pads it",
        "own": "MyLinear has a forward of its own",
        "sub": "it is a MyLinear, a subclass of torch.nn.Linear, whose weight others may read",
        "tied": "it shares its weight with another module",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, a subclass of torch.nn.Linear, whose weight"
        " others may read",
    }
    assert list(nn.sparsify(copy.deepcopy(model), block=8, pad=True)) == ["odd"]
    named = nn.sparsify(model, block=1, filter=lambda name, _: name == "odd")
    assert list(named) == ["odd"] and named.skipped["tied"] == "the filter leaves it out"


# ---- the dense weight ----------------------------------------------------------------------------


def test_the_weight_of_a_swapped_layer_is_read() -> None:
    made = nn.BsrLinear.from_dense(torch.nn.Linear(66, 35), (5, 3), 0.5)
    dense = made.to_dense().weight.detach()
    weight = made.weight
    assert isinstance(weight, torch.Tensor) and weight.shape == (35, 66) and weight.dtype is torch.float32
    assert weight.device == made.data.device and weight.requires_grad and weight.numel() == 35 * 66
    assert torch.equal(weight, dense) and torch.equal(weight[3:7].T, dense[3:7].T) and weight.sum() == dense.sum()
    assert torch.equal(torch.stack([weight, weight]).detach(), torch.stack([dense, dense]))
    assert "weight" not in made.state_dict() and "weight" not in dict(made.named_parameters())
    x = torch.randn(4, 66)
    close(torch.nn.functional.linear(x, weight, made.bias), made(x))
    (weight**2).sum().backward()
    close(made.data.grad, 2 * made.data.detach())
    for call in (lambda: weight.zero_(), lambda: weight.__setitem__(0, 1.0), lambda: torch.nn.init.zeros_(weight)):
        with pytest.raises(TypeError, match="weight: the dense weight of a BsrLinear is read only"):
            call()
    with pytest.raises((KeyError, TypeError, AttributeError)):
        made.weight = torch.nn.Parameter(dense)
    assert made.half().weight.dtype is torch.float16 and made.to("meta").weight.is_meta


def test_looking_at_its_dtype_makes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.BsrLinear.from_dense(torch.nn.Linear(66, 35), (5, 3), 0.5)
    monkeypatch.setattr(nn.BsrLinear, "dense", lambda _: pytest.fail("the dense weight was made"))
    weight = made.weight
    found = (weight.dtype, weight.device, weight.shape, weight.size(0), weight.dim(), weight.ndim, weight.is_cuda)
    assert found == (torch.float32, torch.device("cpu"), (35, 66), 35, 2, 2, False) and weight.requires_grad
    assert weight.layout is torch.strided and weight.element_size() == 4 and weight.is_floating_point()


# ---- models of others ----------------------------------------------------------------------------


def dense_of(model: Any) -> Any:
    """The model with dense layers in the place of swapped ones."""
    found = copy.deepcopy(model)
    for parent in list(found.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.BsrLinear):
                parent.add_module(name, layer.to_dense())
    return found


def compare(model: Any, swapped: Any, call: Any) -> None:
    """A model whose layers were swapped computes what the one with their dense weights does, and so does it learn."""
    assert swapped
    dense = dense_of(model)
    for change in ("eval", "train"):
        for one in (model, dense):
            getattr(one, change)()
        with torch.no_grad():
            close(call(model), call(dense), 2e-4)
    for one in (model, dense):
        one.zero_grad()
        call(one).square().mean().backward()
    of_dense = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in of_dense:
            close(parameter.grad, of_dense[name].grad, 2e-4)
    assert all(layer.data.grad is not None for layer in swapped.values())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoders_of_pytorch(activation: str, batch_first: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    swapped = nn.sparsify(model, block=8, sparsity=0.5)
    assert len(swapped) == 4 and set(swapped.skipped) == {f"layers.{i}.self_attn.out_proj" for i in range(2)}
    x = torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    compare(model, swapped, lambda one: one(x))
    shown = ~(mask if batch_first else mask.T)[..., None]
    compare(model, swapped, lambda one: one(x, src_key_padding_mask=mask) * shown)


def test_a_transformer_of_pytorch() -> None:
    model = torch.nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    swapped = nn.sparsify(model, block=8, sparsity=0.5)
    source, target = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    compare(model, swapped, lambda one: one(source, target))


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "T5": lambda hf: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "T5 gated": lambda hf: hf.T5ForConditionalGeneration(hf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "BERT": lambda hf: hf.BertForMaskedLM(
        hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "GPT-2": lambda hf: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "Llama": lambda hf: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str) -> None:
    hf = pytest.importorskip("transformers")
    model, ids = MODELS[kind](hf), torch.randint(64, (2, 7))
    swapped = nn.sparsify(model, block=8, sparsity=0.5)
    if kind == "GPT-2":  # its layers are of a class of transformers, its output layer shares the embedding
        assert not swapped and swapped.skipped == {"lm_head": "it shares its weight with another module"}
        return
    more = {"decoder_input_ids": ids} if kind.startswith("T5") else {}
    compare(model, swapped, lambda one: one(input_ids=ids, **more).logits)
    if kind != "BERT":
        model.eval()
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            found, wanted = (one.generate(ids, **options) for one in (model, dense_of(model)))
        assert torch.equal(found, wanted)
    if kind.startswith("T5"):
        half, dense = model.bfloat16(), dense_of(model)
        with torch.no_grad():
            have, want = (one(input_ids=ids, **more).logits for one in (half, dense))
        close(have, want, 0.1)
