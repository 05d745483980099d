"""The training loop: one step, the two optimisers, averaged weights, saving, resuming and exporting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vgraph_lab.errors import CheckpointError
from vgraph_lab.inspect.speech_metrics import level_dbfs

from .config import SAMPLE_RATE, RecipeConfig
from .crops import SpeechCrops
from .discriminator import Discriminator, adversarial_loss, discriminator_loss, feature_loss
from .export import export_checkpoint
from .losses import SpectralLoss
from .model import Codec, Rendered
from .quantizer import initialise_codebooks
from .schedule import adversarial_share, average_decay, rate_share
from .state import load_optimizer, load_state, optimizer_tensors, save_state, with_prefix, without_prefix

__all__ = ["Trainer"]

Figures = dict[str, float]


class Trainer:
    """One training, over any number of calls.

    Args:
        config: every number of it.
        crops: where batches come from.
        device: where it runs.
        clock: seconds; a test passes its own.

    Attributes:
        step: steps done, over all calls.
    """

    def __init__(
        self, config: RecipeConfig, crops: SpeechCrops, device: torch.device, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.crops, self.device = config, crops, device
        self.codec = Codec(config).to(device)
        self.discriminator = Discriminator(config.discriminator_windows, config.discriminator_channels).to(device)
        self.spectral_loss = SpectralLoss(SAMPLE_RATE).to(device)
        self._generator_optimizer = _adamw(self.codec, config.generator_rate, config)
        self._discriminator_optimizer = _adamw(self.discriminator, config.discriminator_rate, config)
        self._averages = {name: parameter.detach().clone() for name, parameter in self.codec.named_parameters()}
        self.step = 0
        self._clock, self._started, self._seconds_before = clock, clock(), 0.0

    @property
    def seconds(self) -> float:
        """Training time over all calls."""
        return self._seconds_before + self._clock() - self._started

    @property
    def progress(self) -> float:
        """Share of the training time that is over, 0 … 1."""
        return min(1.0, self.seconds / self.config.total_seconds)

    def train_step(self) -> Figures:
        """One batch through both optimisers. Returns its losses; a step with a non-finite gradient changes no weight."""
        c, progress = self.config, self.progress
        torch.manual_seed((c.seed << 32) + self.step)  # what a step draws depends on the step alone, so resuming is exact
        if self.step == c.quantize_from_step:
            self._start_quantizer()
        for optimizer, rate in ((self._generator_optimizer, c.generator_rate), (self._discriminator_optimizer, c.discriminator_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_share(c, progress, self.step)

        quantized = self.step >= c.quantize_from_step
        rendered = self.codec.render(
            self.crops.draw(), quantized=quantized, update=True, restart_dead=self.step % c.restart_every_steps == 0
        )
        mel, linear = self.spectral_loss(rendered.decoded, rendered.original)
        loss = c.mel_weight * mel + c.linear_weight * linear
        terms = {"mel": mel, "linear": linear}
        if rendered.quantized is not None:
            loss = loss + c.commitment_weight * rendered.quantized.commitment
            terms |= {
                "commitment": rendered.quantized.commitment,
                "error_first": rendered.quantized.error[0],
                "error_rest": rendered.quantized.error[1],
            }
        if progress >= c.adversarial_from:
            adversarial, features, of_discriminator = self._adversarial_terms(rendered)
            loss = loss + adversarial_share(c, progress) * (c.adversarial_weight * adversarial + c.feature_weight * features)
            terms |= {"adversarial": adversarial, "features": features, "discriminator": of_discriminator}
        gradient_norm = _update(self._generator_optimizer, self.codec, loss, c.generator_clip)
        self._average()
        self.step += 1
        return {name: term.item() for name, term in {"loss": loss, **terms, "gradient_norm": gradient_norm}.items()}

    def _start_quantizer(self) -> None:
        with torch.no_grad():
            latents = [self.codec.encoder(self.crops.draw()) for _ in range(self.config.kmeans_batches)]
        initialise_codebooks(self.codec.decoder.quantizer, torch.cat(latents).transpose(1, 2).flatten(0, 1), self.config)

    def _adversarial_terms(self, rendered: Rendered) -> tuple[Tensor, Tensor, Tensor]:
        """Train the discriminator on some of the windows, then let it judge them for the codec."""
        some = torch.randperm(len(rendered.decoded), device=self.device)[: self.config.discriminator_batch]
        decoded, original = rendered.decoded[some], rendered.original[some]
        real = self.discriminator(original)
        of_discriminator = discriminator_loss(real, self.discriminator(decoded.detach()))
        _update(self._discriminator_optimizer, self.discriminator, of_discriminator, self.config.discriminator_clip)
        self.discriminator.requires_grad_(False)  # its own gradients are not wanted below
        judgements = self.discriminator(decoded)
        self.discriminator.requires_grad_(True)
        return adversarial_loss(judgements), feature_loss(real, judgements), of_discriminator

    @torch.no_grad()
    def _average(self) -> None:
        share = 1 - average_decay(self.config, self.step)
        for name, parameter in self.codec.named_parameters():
            self._averages[name].lerp_(parameter, share)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within it, the codec has its averaged weights and tables that fit its codebooks."""
        live = {name: parameter.detach().clone() for name, parameter in self.codec.named_parameters()}
        self._put(self._averages)
        self.codec.decoder.refresh_tables()
        try:
            yield
        finally:
            self._put(live)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.codec.named_parameters():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def validate(self) -> Figures:
        """Averaged weights on held-out synthetic speech: mel loss, change of level in dB, mean perplexity of the levels."""
        usable = len(self.crops.held_out) // self.config.crop_samples
        crops = self.crops.held_out[: usable * self.config.crop_samples].view(usable, -1)[: self.config.batch_size].float() / 32768
        with self.averaged_weights():
            rendered = self.codec.render(crops, quantized=self.step > self.config.quantize_from_step, update=False)
        figures = {
            "held_out_mel": float(self.spectral_loss(rendered.decoded, rendered.original).mel),
            "level_change_db": level_dbfs(rendered.decoded) - level_dbfs(rendered.original),
        }
        if rendered.quantized is not None:
            figures["mean_perplexity"] = _mean_perplexity(rendered.quantized.codes)
        return figures

    def export(self, folder: Path) -> None:
        """A checkpoint folder with the averaged weights."""
        with self.averaged_weights():
            export_checkpoint(self.codec, folder)

    def save(self, path: Path) -> None:
        """Everything that :meth:`resume` needs, in one file."""
        tensors = with_prefix("codec", self.codec.state_dict()) | with_prefix("discriminator", self.discriminator.state_dict())
        tensors |= with_prefix("average", self._averages)
        for name, optimizer, module in self._optimizers():
            tensors |= with_prefix(f"{name}_optimizer", optimizer_tensors(optimizer, _names(module)))
        progress = {"step": self.step, "seconds": self.seconds, "config": self.config.model_dump(mode="json")}
        save_state(path, tensors, progress)

    def resume(self, path: Path) -> None:
        """Continue where :meth:`save` left off: the same steps as if it had never stopped.

        Raises:
            CheckpointError: the file cannot be read, or belongs to a training with other settings.
        """
        tensors, progress = load_state(path, self.device)
        ours = self.config.model_dump(mode="json")
        changed = [key for key in ours if ours[key] != progress["config"].get(key)]
        if changed:
            raise CheckpointError(
                f"{path} was trained with other settings: {', '.join(changed)}. Resume with the settings it has, or start anew."
            )
        self.codec.load_state_dict(without_prefix("codec", tensors))
        self.discriminator.load_state_dict(without_prefix("discriminator", tensors))
        self._averages = without_prefix("average", tensors)
        for name, optimizer, module in self._optimizers():
            load_optimizer(optimizer, _names(module), without_prefix(f"{name}_optimizer", tensors))
        self.step, self._seconds_before, self._started = progress["step"], progress["seconds"], self._clock()

    def _optimizers(self) -> tuple[tuple[str, torch.optim.Optimizer, nn.Module], ...]:
        return (
            ("generator", self._generator_optimizer, self.codec),
            ("discriminator", self._discriminator_optimizer, self.discriminator),
        )


def _names(module: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _adamw(module: nn.Module, rate: float, config: RecipeConfig) -> torch.optim.AdamW:
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas)


def _update(optimizer: torch.optim.Optimizer, module: nn.Module, loss: Tensor, clip: float) -> Tensor:
    """Backward and step, unless the gradient is not finite. Returns its norm before clipping."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
    if torch.isfinite(norm):
        optimizer.step()
    return norm


def _mean_perplexity(codes: Tensor) -> float:
    perplexities = []
    for level in codes.transpose(0, 1).flatten(1):
        share = torch.bincount(level).double() / level.numel()
        perplexities.append(torch.exp(-torch.xlogy(share, share).sum()))
    return float(torch.stack(perplexities).mean())
