"""Recurrent layers of real models, converted by `from_torch`: equal results, times, and what pruning changes.

    pip install --no-deps resemblyzer silero-vad g2p_en        # the weights alone, 30 MB; nothing else is needed
    python scripts/real_models.py --csv scripts/results/real-models-x86-64.csv
    python scripts/real_models.py --folder wheels/             # unpacked wheels in the place of installed packages

Resemblyzer's speaker embedding has three LSTM layers of 256 units, silero-vad one of 128, and encoder and decoder of
g2p_en are GRUs of 256. Each is pruned by magnitude to densities of 1, 0.5 and 0.2, without training after it, and
converted. The dense conversion has to equal PyTorch's module in float64, or the script ends. Then PyTorch's module and
the converted one are timed in turn, on a batch of one.

quality         Resemblyzer: cosine of the embedding with that of the whole model, mean of voices. silero-vad: mean
                difference of the probability of speech. g2p_en: share of words, of its list of homographs, whose
                phonemes are one of the two pronunciations in the list.

The two speech models hear synthetic voices: harmonics of a gliding pitch under three formants, with pauses. The
packages carry no recordings.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from heads import Report, ready, show
from real_vocabulary import safetensors
from reproduction import provenance

import tvm_sparse
from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, errors, fail, machine_here

COLUMNS = (
    "model", "layers", "dtype", "density", "steps", "difference", "quality", "torch_us", "ours_us", "torch / ours",
)  # fmt: skip
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
RATE, LOUDNESS = 16_000, -30  # samples a second, of both speech models; decibels of full scale
# The largest difference of a converted layer's results, whose values lie within 1, from the module's in float64.
EQUAL = {"float32": 2e-4, "float16": 2e-2}

Layers = Callable[..., Any]
Quality = Callable[[Sequence[Layers]], float]


@dataclass(frozen=True)
class Model:
    """Modules of a model, an input `(1, steps, features)` of each, and the quality of the model with other layers."""

    name: str
    modules: tuple[torch.nn.RNNBase, ...]
    inputs: tuple[torch.Tensor, ...]
    quality: Quality


def folder_of(package: str, folder: Path | None) -> Path:
    if folder is not None:
        return folder / package
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        fail(f"{package} is not installed: pip install --no-deps resemblyzer silero-vad g2p_en, or pass --folder")
    return Path(found.submodule_search_locations[0])


def layers_of(kind: str, weights: Sequence[Sequence[Any]]) -> torch.nn.RNNBase:
    """A batch-first module of `weights`: input weight, recurrent weight and their biases of each layer."""
    rows, inputs = weights[0][0].shape
    hidden = weights[0][1].shape[1]
    assert rows == hidden * {"LSTM": 4, "GRU": 3}[kind]
    module = getattr(torch.nn, kind)(inputs, hidden, len(weights), batch_first=True)
    with torch.no_grad():
        for number, layer in enumerate(weights):
            for name, value in zip(WEIGHTS, layer, strict=True):
                getattr(module, f"{name}_l{number}").copy_(torch.as_tensor(value))
    return module.eval().requires_grad_(False)


# ---- speech ------------------------------------------------------------------------------------------------------


def voice(rng: np.random.Generator, seconds: float) -> np.ndarray:
    """A synthetic voice, float32 samples at the loudness to which Resemblyzer brings recordings."""
    count = int(seconds * RATE)
    time = np.arange(count) / RATE
    base, glide = rng.uniform(90, 220), rng.uniform(0.05, 0.25)
    phase = 2 * np.pi * np.cumsum(base * (1 + glide * np.sin(2 * np.pi * rng.uniform(0.5, 2) * time))) / RATE
    formants = np.array([rng.uniform(300, 800), rng.uniform(900, 2200), rng.uniform(2300, 3200)])
    harmonics = np.arange(1, int(RATE / 2 / base / 1.3))
    gains = sum(np.exp(-(((harmonics * base - f) / 180) ** 2)) for f in formants) + 0.02
    sound = (gains[:, None] * np.sin(harmonics[:, None] * phase)).sum(0)
    sound *= np.clip(np.sin(2 * np.pi * rng.uniform(1, 3) * time + rng.uniform(0, 6)) + 0.4, 0, None)  # syllables
    sound += 0.01 * rng.standard_normal(count)
    return (sound * 10 ** (LOUDNESS / 20) / np.sqrt(np.mean(sound**2))).astype(np.float32)


def mel_spectrum(sound: np.ndarray, channels: int = 40, window: int = 400, step: int = 160) -> np.ndarray:
    """`(frames, channels)`: powers of triangular filters, evenly spaced in mel below 1 kHz and by ratios above."""
    cut = np.lib.stride_tricks.sliding_window_view(sound, window)[::step] * np.hanning(window + 1)[:-1]
    power = np.abs(np.fft.rfft(cut)) ** 2
    linear, ratio = 200 / 3, np.log(6.4) / 27

    def hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * linear, 1000 * np.exp(ratio * (mel - 15)))

    edges = hertz(np.linspace(0, 15 + np.log(RATE / 2000) / ratio, channels + 2))
    at = np.fft.rfftfreq(window, 1 / RATE)
    rise = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    filters = np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return (power @ filters.T).astype(np.float32)


def resemblyzer(folder: Path, rng: np.random.Generator) -> Model:
    state = torch.load(folder / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    lstm = layers_of("LSTM", [[state[f"lstm.{name}_l{i}"] for name in WEIGHTS] for i in range(3)])
    heard = torch.stack([torch.from_numpy(mel_spectrum(voice(rng, 1.62))[:160]) for _ in range(16)])

    def embeddings(layers: Layers) -> torch.Tensor:
        last = layers(heard)[1][0][-1]
        found = torch.relu(torch.nn.functional.linear(last.float(), state["linear.weight"], state["linear.bias"]))
        return found / found.norm(dim=1, keepdim=True)

    wanted = embeddings(lstm)
    return Model("resemblyzer", (lstm,), (heard[:1],), lambda new: float((embeddings(new[0]) * wanted).sum(1).mean()))


def silero(folder: Path, rng: np.random.Generator) -> Model:
    arrays = safetensors(folder / "data" / "silero_vad_16k.safetensors")
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    lstm = layers_of("LSTM", [[state[f"lstm_cell.{name}"] for name in WEIGHTS]])
    parts = [part for _ in range(6) for part in (voice(rng, 1.5), 0.01 * rng.standard_normal(RATE, np.float32))]
    sound, context, each = torch.from_numpy(np.concatenate(parts)), 64, 512
    sound = torch.nn.functional.pad(sound[: len(sound) // each * each], (context, 0))
    windows = sound.unfold(0, context + each, each)[:, None]

    # The layers before the recurrent one: a Fourier transform as a convolution, magnitudes, and four convolutions.
    x = torch.nn.functional.conv1d(
        torch.nn.functional.pad(windows, (0, 64), "reflect"), state["stft_conv.weight"], stride=128
    )
    x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
    for number, stride in enumerate((1, 2, 2, 1), 1):
        weight, bias = state[f"conv{number}.weight"], state[f"conv{number}.bias"]
        x = torch.relu(torch.nn.functional.conv1d(x, weight, bias, stride, 1))
    heard = x.squeeze(-1)[None]

    def speech(layers: Layers) -> torch.Tensor:
        hidden = torch.relu(layers(heard)[0].float())
        return torch.sigmoid(hidden @ state["final_conv.weight"][0, :, 0] + state["final_conv.bias"])

    wanted = speech(lstm)
    return Model("silero-vad", (lstm,), (heard,), lambda new: float((speech(new[0]) - wanted).abs().mean()))


# ---- words to phonemes -------------------------------------------------------------------------------------------

GRAPHEMES = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
BEGIN, END, LONGEST = 2, 3, 20
PHONEMES = (
    "<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0 AY1 AY2 B CH D DH EH0 EH1 EH2"
    " ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH UH0"
    " UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH"
).split()


def g2p(folder: Path, rng: np.random.Generator) -> Model:
    state = {name: torch.from_numpy(value) for name, value in np.load(folder / "checkpoint20.npz").items()}
    encoder, decoder = (
        layers_of("GRU", [[state[f"{part}_{name}"] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]])
        for part in ("enc", "dec")
    )
    lines = (folder / "homographs.en").read_text(encoding="utf-8").splitlines()
    entries = [line.lower().split("|") for line in lines if line.strip() and not line.startswith("#")]
    words = {e[0]: {e[1].upper(), e[2].upper()} for e in entries if e[0].isascii() and e[0].isalpha()}
    letters = [[GRAPHEMES.index(letter) for letter in word] + [GRAPHEMES.index("</s>")] for word in words]
    by_length: dict[int, list[int]] = {}
    for number, found in enumerate(letters):
        by_length.setdefault(len(found), []).append(number)

    def pronounced(new: Sequence[Layers]) -> float:
        right = 0
        for numbers in by_length.values():
            heard = state["enc_emb"][torch.tensor([letters[n] for n in numbers])]
            hidden = new[0](heard)[1]
            last, said = torch.full((len(numbers),), BEGIN), []
            for _ in range(LONGEST):
                output, hidden = new[1](state["dec_emb"][last][:, None], hidden)
                last = (output[:, 0].float() @ state["fc_w"].T + state["fc_b"]).argmax(1)
                said.append(last)
            for number, spoken in zip(numbers, torch.stack(said, 1).tolist(), strict=True):
                ended = spoken[: spoken.index(END)] if END in spoken else spoken
                right += " ".join(PHONEMES[p] for p in ended) in list(words.values())[number]
        return right / len(words)

    heard = state["enc_emb"][torch.tensor(letters[int(rng.integers(len(letters)))])][None]
    return Model("g2p_en", (encoder, decoder), (heard, state["dec_emb"][:1][None]), pronounced)


# ---- the run -----------------------------------------------------------------------------------------------------


def converted(module: torch.nn.RNNBase, density: float, dtype: str) -> Any:
    return tvm_sparse.from_torch(module, density=None if density == 1 else density, dtype=dtype)


def largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted).abs().max())


def main(
    target: Target = "auto",
    folder: Annotated[Path | None, typer.Option(help="Where the packages lie unpacked.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    densities: Annotated[str, typer.Option(help="Of the pruned layers; 1 is the whole model.")] = "1,0.5,0.2",
    dtypes: Annotated[str, typer.Option(help="Default: float32, on a GPU float16, too.")] = "",
    seed: Annotated[int, typer.Option(help="Of the voices.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing.")] = 9,
) -> None:
    """Convert the layers of three models, compare, prune and time them."""
    with errors():
        where = machine_here(target, "comparing")
        device = "cuda" if where.kind == "cuda" else "cpu"
        kinds = dtypes.split(",") if dtypes else ["float32", "float16"] if device == "cuda" else ["float32"]
        rng, report = np.random.default_rng(seed), Report(csv_path, provenance(where), COLUMNS)
        models = [
            make(folder_of(package, folder), rng)
            for make, package in ((resemblyzer, "resemblyzer"), (silero, "silero_vad"), (g2p, "g2p_en"))
        ]
        rows, made, problems = [], [], []
        for model in models:
            for density in map(float, densities.split(",")):
                for dtype in kinds:
                    for module, x in zip(model.modules, model.inputs, strict=True):
                        layers = converted(module, density, dtype).to(device)
                        made.append((model, density, dtype, module, x, layers))
                        for layer in layers.layers:
                            problems += layer.problems(x.shape[1], len(x), target=device).values()
        quality = {
            (model.name, density): model.quality([converted(one, density, "float32") for one in model.modules])
            for model in models
            for density in map(float, densities.split(","))
        }
        with ready(problems, where):
            for model, density, dtype, module, x, layers in made:
                kind = getattr(torch, dtype)
                # PyTorch's module in 16 bits is further from this than the converted one.
                wanted = copy.deepcopy(module).double()(x.double())[0]
                theirs, x = copy.deepcopy(module).to(device, kind), x.to(device, kind)
                difference = largest(layers(x)[0], wanted)
                if density == 1 and difference > EQUAL[dtype]:
                    fail(f"{model.name}: the converted layers differ by {difference:.2g} in {dtype}")
                calls = {"torch": lambda m=theirs, x=x: m(x), "ours": lambda m=layers, x=x: m(x)}
                times = (time_cuda if device == "cuda" else time_cpu)(calls, rounds)
                torch_s, ours_s = (float(np.median(times[name][1])) for name in ("torch", "ours"))
                cells = {
                    "model": model.name,
                    "layers": f"{module.num_layers} {module.mode} of {module.hidden_size}",
                    "dtype": dtype,
                    "density": density,
                    "steps": x.shape[1],
                    "difference": f"{difference:.2g}",
                    "quality": f"{quality[model.name, density]:.4f}",
                    "torch_us": f"{torch_s * 1e6:.1f}",
                    "ours_us": f"{ours_s * 1e6:.1f}",
                    "torch / ours": f"{torch_s / ours_s:.2f}",
                }
                report.add(**cells)
                rows.append([str(cell) for cell in cells.values()])
        show(f"layers of real models on {where.name}", COLUMNS, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
