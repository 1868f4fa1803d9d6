"""How a pipeline's steps are ordered: one value, from which each step's cores are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.dispatch.agreement import AGREEMENTS, Agreement, Alone, make_agreement
from rrfp_jax.dispatch.arbiter import Policy
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.hints import Hint, load_hint
from rrfp_jax.sim import check_hint, fixed_orders, peak_bytes, stage_budgets
from rrfp_jax.task import StageShape

MODES = ("readiness", "fixed")


class Schedule:
    """A hint with everything around it. Holds the fixed orders that it has worked out.

    Args:
      hint: A hint, a shipped hint's name or ``module:object``.
      mode: ``readiness`` or ``fixed``.
      activation_budget: A multiple of what 1F1B holds on the stage that it fills most, or
        bytes; all stages have the same. With fixed orders a
        multiple has no say, because the order bounds what is held; bytes are checked
        against it before the step.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Whether W runs in microbatch order.
      agreement: ``leader`` or ``allgather``: how processes that share a stage choose its
        next task.
      stall_timeout_s: A stage that hears nothing for so long fails.
      shapes: The stages' tasks, first to last.
      largest_bytes: For each stage, what a microbatch of the largest bucket holds.

    Raises:
      ValueError: An argument is out of range, or the hint does not work.
    """

    def __init__(
        self,
        *,
        hint: str | Hint,
        mode: str,
        activation_budget: ActivationBudget | str | int,
        launch_ahead: int,
        deterministic: bool,
        agreement: str,
        stall_timeout_s: float,
        shapes: Sequence[StageShape],
        largest_bytes: Sequence[int],
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
        if agreement not in AGREEMENTS:
            raise ValueError(
                f"agreement must be one of {', '.join(AGREEMENTS)}, got {agreement!r}."
            )
        if launch_ahead < 0:
            raise ValueError(f"launch_ahead must be 0 or more kernels, got {launch_ahead}.")
        if not stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s must be above 0 seconds, got {stall_timeout_s}.")
        self._hint = load_hint(hint)
        self._mode = mode
        self._budget = ActivationBudget.parse(activation_budget)
        self._launch_ahead = launch_ahead
        self._deterministic = deterministic
        self._agreement = agreement
        self._stall_timeout_ns = int(stall_timeout_s * 1e9)
        self._shapes = tuple(shapes)
        self._largest_bytes = tuple(largest_bytes)
        self._orders: dict[int, Sequence[Policy]] = {}
        check_hint(self._hint, self._shapes, 2 * len(self._shapes), deterministic=deterministic)

    def replaced(
        self, *, hint: str | Hint, mode: str, activation_budget: ActivationBudget | str | int
    ) -> Schedule:
        """The same stages in another order.

        Args:
          hint: As for the class, as the others.
          mode: ``readiness`` or ``fixed``.
          activation_budget: A multiple of what 1F1B holds, or bytes.

        Raises:
          ValueError: An argument is out of range, or the hint does not work.
        """
        return Schedule(
            hint=hint,
            mode=mode,
            activation_budget=activation_budget,
            launch_ahead=self._launch_ahead,
            deterministic=self._deterministic,
            agreement=self._agreement,
            stall_timeout_s=self._stall_timeout_ns / 1e9,
            shapes=self._shapes,
            largest_bytes=self._largest_bytes,
        )

    def agreement(self, member: int, num_members: int) -> Agreement:
        """How a member of a stage group agrees with the others, each in a process of its own.

        Args:
          member: From 0; this one leads, if one does.
          num_members: Of the group.
        """
        return make_agreement(self._agreement, member=member, num_members=num_members)

    def budgets(self, num_microbatches: int) -> tuple[int, ...]:
        """For each stage, the bytes that admitted microbatches may hold.

        A multiple is of what 1F1B holds in the stage's largest bucket.
        """
        return stage_budgets(self._budget, self._shapes, num_microbatches, self._largest_bytes)

    def cores(
        self, microbatch_bytes: Sequence[Sequence[int]], agreements: Mapping[int, Agreement]
    ) -> dict[int, StageCore]:
        """The state machines of one replica's training step.

        Args:
          microbatch_bytes: For every stage, what each microbatch will hold there.
          agreements: For each stage of this process, how it agrees with the other processes
            of its group. A fixed order needs none.

        Raises:
          ValueError: A fixed order holds more than the budget's bytes.
        """
        num_microbatches = len(microbatch_bytes[0])
        budgets = self.budgets(num_microbatches)
        policies = self._policies(num_microbatches)
        if self._mode == "fixed" and self._budget.is_absolute:
            self._check_fixed(policies, microbatch_bytes, budgets)
        return {
            stage: self._core(
                self._shapes[stage],
                policies[stage],
                microbatch_bytes[stage],
                budgets[stage],
                agreement
                if self._mode == "readiness"
                else Alone(num_members=agreement.num_members),
            )
            for stage, agreement in agreements.items()
        }

    def evaluation_cores(
        self,
        shapes: Sequence[StageShape],
        num_microbatches: int,
        agreements: Mapping[int, Agreement],
    ) -> dict[int, StageCore]:
        """The state machines of one evaluation, in which nothing is kept."""
        hint, none_held = load_hint("bfw"), [0] * num_microbatches
        return {
            stage: self._core(shapes[stage], hint, none_held, None, agreement)
            for stage, agreement in agreements.items()
        }

    def _policies(self, num_microbatches: int) -> Sequence[Policy]:
        if self._mode == "readiness":
            return [self._hint] * len(self._shapes)
        if num_microbatches not in self._orders:
            self._orders[num_microbatches] = fixed_orders(
                self._hint, self._shapes, num_microbatches, deterministic=self._deterministic
            )
        return self._orders[num_microbatches]

    def _core(
        self,
        shape: StageShape,
        policy: Policy,
        microbatch_bytes: Sequence[int],
        budget_bytes: int | None,
        agreement: Agreement,
    ) -> StageCore:
        return StageCore(
            shape=shape,
            policy=policy,
            microbatch_bytes=microbatch_bytes,
            budget_bytes=budget_bytes,
            launch_ahead=self._launch_ahead,
            deterministic=self._deterministic,
            stall_timeout_ns=self._stall_timeout_ns,
            agreement=agreement,
        )

    def _check_fixed(
        self,
        orders: Sequence[Policy],
        microbatch_bytes: Sequence[Sequence[int]],
        budgets: Sequence[int],
    ) -> None:
        for shape, order, own_bytes, budget in zip(
            self._shapes, orders, microbatch_bytes, budgets, strict=True
        ):
            assert not isinstance(order, Hint)
            peak = peak_bytes(order, shape.last_kind, own_bytes, launch_ahead=self._launch_ahead)
            if peak > budget:
                raise ValueError(
                    f"the fixed order of hint {self._hint.name!r} holds {peak:,} bytes on stage "
                    f"{shape.stage}, the budget is {budget:,}; raise schedule.activation_budget, "
                    "use schedule.mode=readiness, or have fewer microbatches."
                )
