"""How a run's routers share tokens among experts: counted, told, and evened out by their biases.

Balancing is loss-free as in arXiv 2408.15664, Algorithm 1, and in DeepSeek-V3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lacuna.model.architecture import decoder_layers
from lacuna.model.build import BuiltModel
from lacuna.model.inputs import Inputs
from lacuna.model.router_kinds import biases_of, logits_of, routers_of, scores_of
from lacuna.parallel.around_layers import leave_uncompiled
from lacuna.parallel.expert_stacks import stacks_of


class RouterLoad:
    """Counts, over a step and all ranks, the tokens that choose each expert; padding left out.

    Counting adds to tensors on the device, and the host waits for these only in `report`. With a
    `rate`, `after_step` moves the biases by which routers choose. If it is `reported`, the entropy
    of routers is measured as well.

    Attributes:
        experts: the experts of each layer, 0 where it has none.
        micro_batches: what was counted of each by each stage: float64 [layers, most experts + 2],
            the tokens that chose each expert, the sum of entropies, and the number of tokens.
        counted: the same of the whole last step; `is_summed` says whether of all ranks.
    """

    def __init__(self, built: BuiltModel, rate: float, reported: bool) -> None:
        self.device = built.device
        self.rate = rate
        self.layers = [*decoder_layers(built.model)]
        scores = scores_of(built.model.config) if reported else None
        counts = torch.zeros(len(self.layers), dtype=torch.int64, device=self.device)
        for place, layer in enumerate(self.layers):
            for stack in stacks_of([layer]):
                counts[place] = int(stack.num_experts)  # type: ignore[arg-type]
                # A layer counts in Python, which would not compile as one graph. Where it is
                # compiled in parts, counting is between them.
                stack.register_forward_pre_hook(torch.compiler.disable(partial(self._count, place)))
                leave_uncompiled(layer)
            for router, index in routers_of(built.model, layer):
                if scores is not None:
                    measure = partial(self._measure, place, scores, index)
                    router.register_forward_hook(torch.compiler.disable(measure))
        dist.all_reduce(counts, dist.ReduceOp.MAX)  # stages of a pipeline have different layers
        self.experts: list[int] = counts.tolist()
        self.micro_batches: dict[tuple[int, int], tuple[Inputs, Tensor]] = {}
        self.counted = self._nothing()
        self.is_summed = True
        self._watch_forward(built)

    def _nothing(self) -> Tensor:
        shape = len(self.layers), max(self.experts) + 2
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _watch_forward(self, built: BuiltModel) -> None:
        """Has the stages of this rank tell, in place, which micro-batch they are about to run."""
        if built.pipeline is not None:
            run = built.pipeline.run

            def run_stage(stage: Any, inputs: Inputs, reading: Any) -> Tensor:
                self._begin(stage.index, inputs)
                return run(stage, inputs, reading)

            built.pipeline.run = run_stage
            return
        forward: Any = built.model.run_forward

        def run_model(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
            self._begin(0, arguments[-1])
            found: Tensor = forward(function, *arguments)
            return found

        setattr(built.model, "run_forward", run_model)  # noqa: B010

    def _begin(self, stage: int, inputs: Inputs) -> None:
        """Makes room for what the forward pass of a micro-batch is about to count.

        A pass that is made twice, as torch does to learn a pipeline's shapes, counts once.
        """
        if torch.is_grad_enabled() and self.layers[0].training:
            self.real = inputs.columns["real"].flatten().double()
            self.current = self._nothing()
            # With the inputs, so that no others get their number while the step lasts.
            self.micro_batches[stage, id(inputs)] = inputs, self.current

    def _count(self, place: int, stack: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if _is_counting(stack):
            chosen = arguments[1]
            tokens = self.real[:, None].expand_as(chosen)
            self.current[place].index_add_(0, chosen.flatten(), tokens.flatten())
            self.current[place, -1] += self.real.sum()

    def _measure(
        self,
        place: int,
        scores: Callable[[Tensor], Tensor],
        index: int,
        router: nn.Module,
        _: Any,
        output: Any,
    ) -> None:
        if _is_counting(router):
            entropy = torch.special.entr(scores(logits_of(output, index))).sum(-1)
            self.current[place, -2] += (self.real * entropy).sum()

    def after_step(self, skip: Tensor) -> None:
        """Ends a step: moves the biases, in place, unless `skip` is 1.

        Each expert's bias moves by the rate, up where fewer tokens than the mean chose the expert,
        and down where more did.
        """
        self.counted = self._nothing()
        for _, counted in self.micro_batches.values():
            self.counted += counted
        self.micro_batches.clear()
        self.is_summed = False
        if self.rate:
            self._sum_over_ranks()
            for place, layer in enumerate(self.layers):
                load = self.counted[place, : self.experts[place]]
                for bias in biases_of(layer):
                    direction = (load.mean() - load).sign() * (1 - skip)
                    bias.view(-1).add_(direction.to(bias.dtype), alpha=self.rate)

    def _sum_over_ranks(self) -> None:
        # Ranks have different tokens or different layers, since matrices are not split.
        if not self.is_summed:
            dist.all_reduce(self.counted)
        self.is_summed = True

    def report(self) -> dict[str, float | list[float] | None]:
        """What the last step's row of metrics says of the routers; all ranks must call it.

        Of each layer with experts, counted from 0: each expert's share of the choices, the largest
        violation (the largest load over the mean, minus 1), and the mean entropy of the router's
        distribution in nats; then the largest violation of all layers, and their mean entropy. All
        are None where no token was counted.
        """
        self._sum_over_ranks()
        row: dict[str, float | list[float] | None] = {}
        violations = []
        entropies = []
        for place, numbers in enumerate(self.counted.tolist()):
            if not self.experts[place]:
                continue
            load = numbers[: self.experts[place]]
            entropy, tokens = numbers[-2:]
            shares = [one / max(sum(load), 1) for one in load]
            violations.append(max(shares) * len(shares) - 1)
            entropies.append(entropy / max(tokens, 1))
            row[f"router_load_{place}"] = shares
            row[f"router_violation_{place}"] = violations[-1]
            row[f"router_entropy_{place}"] = entropies[-1]
        row["router_violation"] = max(violations)
        row["router_entropy"] = sum(entropies) / len(entropies)
        return row if any(violation > -1 for violation in violations) else dict.fromkeys(row)


def _is_counting(module: nn.Module) -> bool:
    """Whether a forward pass is a first one that is learnt from.

    In the backward pass layers are run again only to recompute what they had forgotten.
    """
    is_learning = module.training and torch.is_grad_enabled()
    return is_learning and torch._C._current_graph_task_id() == -1
