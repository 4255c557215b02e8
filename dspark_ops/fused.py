"""`FusedMarkov`: the sampler of one speculator, with scratch that keeps its address and noise that runs beside the lm_head."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from . import block, guards, ops
from .guards import Call

# Noise ahead pays while its buffer is small beside the lm_head's traffic: 64 rows and steps of 163,840 entries are 42 MB.
NOISE_ROWS = 64
# A block of more steps allocates the scratch of its launch anew.
MOST_STEPS = 16


def _device(device: torch.device | str) -> torch.device:
    """A device as tensors have it: with its index, for "cuda" that of the current one."""
    return torch.empty(0, device=device).device


def _state(t: Tensor) -> tuple[object, ...]:
    """What tells a tensor, kept alive, from another, and from itself after a write; an inference tensor counts none."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, None if t.is_inference() else t._version


class FusedMarkov:
    """Scratch and a side stream for one speculator's sampling, eager or captured in CUDA graphs; the results are those of the function.

    The scratch is allocated here, for the largest batch, and never again, so the addresses in a captured graph stay valid as long as the object
    lives. Compiled code calls `markov_sample_sequential`, whose scratch the compiler plans. One object serves one stream at a time, and its
    noise one block: that of another block, or of arguments written since, is refused. Writes that torch does not count are not noticed: those
    of raw kernels and of replayed graphs, through `.data` or numpy, and to inference tensors.

    Args:
        vocab: draft vocabulary V.
        rank: Markov rank.
        max_rows: the most requests R of a call.
        device: where the tensors are; on one that the fused kernels do not serve, the methods work in order and without scratch.
        use_fp64: noise and keys in FP64; then there is no noise ahead.

    Raises:
        TypeError: a size is no int, or use_fp64 no bool.
        ValueError: a size is below 1.

    >>> import torch
    >>> fused = FusedMarkov(vocab=8, rank=16, max_rows=4, device="cpu")
    >>> seeds, positions, slots = torch.tensor([3, 4]), torch.tensor([[9, 10], [9, 10]]), torch.tensor([1, 0])
    >>> fused.fork_noise(seeds, positions, slots)  # then the lm_head, which gives the base logits
    >>> fused.run(
    ...     torch.zeros(2, 2, 8), torch.tensor([1, 2]), torch.zeros(8, 16), torch.zeros(8, 16),
    ...     temperature=torch.ones(2), seeds=seeds, sample_pos=positions, idx_mapping=slots,
    ... ).shape
    torch.Size([2, 2])
    """

    def __init__(self, vocab: int, rank: int, max_rows: int, device: torch.device | str, use_fp64: bool = False) -> None:
        for name, size in (("vocab", vocab), ("rank", rank), ("max_rows", max_rows)):
            guards.check_size(name, size, 1)
        wrong_type = guards.flag_error(use_fp64)
        if wrong_type is not None:
            raise wrong_type
        self.vocab, self.rank, self.max_rows, self.use_fp64 = vocab, rank, max_rows, use_fp64
        self.device = _device(device)
        self._forked: Tensor | None = None
        self._sources: tuple[Tensor, ...] = ()
        self._states: tuple[tuple[object, ...], ...] = ()
        self._joined = True
        self._side: torch.cuda.Stream | None = None
        if guards.device_reason(self.device) is None:
            maxima = max_rows * ops.MOST_PROGRAMS.programs(vocab)
            self._best_key = torch.empty(maxima, dtype=ops.key_dtype(use_fp64), device=self.device)
            self._best_token = torch.empty(maxima, dtype=torch.int32, device=self.device)
            self._side = torch.cuda.Stream(self.device)
            if guards.block_device_reason(self.device) is None:
                self._scratch = block.new_scratch(MOST_STEPS, self.device)
            if not use_fp64:
                self._noise = torch.empty((min(NOISE_ROWS, 16 * max_rows), vocab), dtype=torch.float32, device=self.device)

    @classmethod
    def of(cls, owner: object, vocab: int, rank: int, max_rows: int, device: torch.device | str, use_fp64: bool = False) -> FusedMarkov:
        """The sampler of a speculator: made on the first call, the same object after, a larger one once a larger batch is announced.

        The larger one takes the place of the object before, whose scratch goes with its last reference: announce the largest batch before
        graphs are captured, or keep the object they were captured with.

        Args: `owner` is the speculator, any weakly referenceable object; the others as for the class.

        >>> class Speculator: ...
        >>> speculator = Speculator()
        >>> FusedMarkov.of(speculator, 8, 16, 4, "cpu") is FusedMarkov.of(speculator, 8, 16, 2, "cpu")
        True
        """
        # By identity: owners that compare equal are two speculators, and must share neither scratch nor noise.
        if id(owner) not in _samplers:
            weakref.finalize(owner, _samplers.pop, id(owner), None)
        samplers = _samplers.setdefault(id(owner), {})
        key = (_device(device), vocab, rank, use_fp64)
        if key not in samplers or samplers[key].max_rows < max_rows:
            samplers[key] = cls(vocab, rank, max_rows, device, use_fp64)
        return samplers[key]

    def noise_rows(self, num_reqs: int, num_steps: int) -> int:
        """How many rows and steps of noise `fork_noise` computes ahead for a batch: all of them, or 0 where they are FP64 or too many.

        >>> FusedMarkov(8, 16, 4, "cpu").noise_rows(2, 7)
        14
        """
        rows = num_reqs * num_steps
        return rows if not self.use_fp64 and num_reqs <= self.max_rows and rows <= min(NOISE_ROWS, 16 * self.max_rows) else 0

    def fork_noise(self, seeds: Tensor, sample_pos: Tensor, idx_mapping: Tensor) -> None:
        """Starts the noise of a block on the side stream, after what the current stream holds; nothing where `noise_rows` is 0.

        Call it before the lm_head with the arguments that `run` gets; they must not be written before `run`. Noise that was forked before and
        did not meet its block is forgotten.

        Raises: TypeError, ValueError: as `markov_noise`; ValueError where the tensors are not on the device of the object.
        """
        self._take_noise()
        error = guards.noise_error(seeds, sample_pos, idx_mapping, self.vocab, None)
        if error is not None:
            raise error
        self._check_device("seeds", seeds)
        num_reqs, num_steps = sample_pos.shape
        rows = self.noise_rows(num_reqs, num_steps)
        if rows == 0:
            return
        # Kept until `run`, which checks them; their memory is the side stream's until it is joined.
        self._sources = (seeds, sample_pos, idx_mapping)
        self._states = tuple(map(_state, self._sources))
        if self._side is None:
            self._forked = ops.markov_noise(seeds, sample_pos, idx_mapping, self.vocab)
            return
        noise = self._noise[:rows].view(num_reqs, num_steps, self.vocab)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            ops.launch_noise(seeds, sample_pos, idx_mapping, self.vocab, None, noise)
        self._forked, self._joined = noise, False

    def join(self) -> None:
        """Makes the current stream wait for the noise; `run` does it where it was not done."""
        if not self._joined:
            assert self._side is not None
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            self._joined = True

    def _take_noise(self) -> Tensor | None:
        """The noise that was forked and not used, joined, for the last time: its sources may be freed."""
        self.join()
        forked, self._forked, self._sources = self._forked, None, ()
        return forked

    def _check_device(self, name: str, t: Tensor) -> None:
        if t.device != self.device:
            raise ValueError(
                f"{name} must be on the device of this FusedMarkov, {self.device}, got {t.device}; make another with FusedMarkov.of"
            )

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples a block as `markov_sample_sequential` does, which has the arguments, with the noise that was forked for it.

        Raises: TypeError, ValueError: as the function; ValueError where the batch, vocabulary, rank or device is not what the object was made
        for, or where the noise was forked for other seeds, positions or slots.
        """
        forked = self._take_noise()
        plan = kwargs.pop("plan", "auto")
        call = Call(*args, **kwargs)
        error = guards.error(call, plan)
        if error is not None:
            raise error
        self._check_device("base_logits", call.base_logits)
        num_reqs, num_steps, _ = call.base_logits.shape
        for name, size, fits in (
            ("requests in base_logits", num_reqs, num_reqs <= self.max_rows),
            ("vocabulary of base_logits", call.num_columns, call.num_columns == self.vocab),
            ("rank of markov_w1", call.markov_w1.shape[1], call.markov_w1.shape[1] == self.rank),
            ("use_fp64", call.use_fp64, call.use_fp64 == self.use_fp64),
        ):
            if not fits:
                raise ValueError(
                    f"{name} must fit this FusedMarkov (vocab={self.vocab}, rank={self.rank}, max_rows={self.max_rows}, "
                    f"use_fp64={self.use_fp64}), got {size}; make another with FusedMarkov.of"
                )
        if forked is not None and call.noise is None and call.temperature is not None and call.draft_to_target is None:
            if forked.shape[:2] != (num_reqs, num_steps):
                raise ValueError(f"base_logits must have the R and K of fork_noise, {tuple(forked.shape[:2])}, got {(num_reqs, num_steps)}")
            for name, state in zip(("seeds", "sample_pos", "idx_mapping"), self._states, strict=True):
                given = _state(getattr(call, name))
                if given != state:
                    what = "another" if given[:-1] != state[:-1] else "one that was written since"
                    raise ValueError(f"{name} must be the tensor that fork_noise got, whose noise this would be, got {what}")
            call = call._replace(noise=forked)
        chosen, reason = guards.choose(call, plan)
        if reason is not None:
            guards.note_once(chosen, reason)
        if chosen != "reference":
            ops.tell_autograd(call)
        if chosen == "block":
            return block.launch_block(call, self._scratch)
        if chosen == "step":
            return ops.launch_steps(call, self._best_key, self._best_token)
        return torch.ops.dspark.markov_sample_sequential(*call, chosen)


_samplers: dict[int, dict[tuple[torch.device, int, int, bool], FusedMarkov]] = {}  # by the id of a living owner
