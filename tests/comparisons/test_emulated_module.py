"""The emulated stage spends F, B and W where each schedule of torch's expects them."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `peers`)")

from torch.distributed.pipelining import _backward  # noqa: E402

from benchmarks.emulated_module import Clock, EmulatedStage  # noqa: E402
from benchmarks.peer_schedules import StageDurations  # noqa: E402

F, B, W = 1.0, 2.0, 4.0


class Spent(Clock):
    """Takes note instead of sleeping."""

    def __init__(self):
        super().__init__()
        self.durations_s = []

    def spend(self, duration_s):
        self.durations_s.append(duration_s)

    def since(self):
        found, self.durations_s = self.durations_s, []
        return found


@pytest.fixture
def clock():
    return Spent()


@pytest.fixture
def stage(clock):
    module = EmulatedStage(3, clock)
    module.durations = StageDurations(forward_s=(0.0, F), input_s=(0.0, B), weight_s=(0.0, W))
    return module


def forward(stage, *, is_first=False):
    x_1D = torch.ones(1, 3, requires_grad=not is_first)  # microbatch 1
    return x_1D, stage(x_1D)


def test_forward_spends_f_and_passes_on_the_number_of_the_microbatch(stage, clock):
    x_1D, y_1D = forward(stage)
    assert clock.since() == [F]
    assert torch.equal(x_1D, y_1D)


def test_whole_backward_spends_b_before_w(stage, clock):
    x_1D, y_1D = forward(stage)
    clock.since()
    _backward.stage_backward((y_1D,), (torch.ones(1, 3),), (x_1D,))
    assert clock.since() == [B, W]
    assert torch.equal(stage.weight.grad, torch.ones(3))


def test_split_backward_spends_b_for_the_input_and_w_for_the_weight(stage, clock):
    x_1D, y_1D = forward(stage)
    clock.since()
    gradients, groups = _backward.stage_backward_input(
        [y_1D], [torch.ones(1, 3)], [x_1D], stage.parameters()
    )
    assert clock.since() == [B]
    assert torch.equal(gradients[0], torch.ones(1, 3))
    assert stage.weight.grad is None
    _backward.stage_backward_weight(stage.parameters(), groups)
    assert clock.since() == [W]
    assert torch.equal(stage.weight.grad, torch.ones(3))


def test_first_stage_spends_all_of_its_backward_at_once(stage, clock):
    x_1D, y_1D = forward(stage, is_first=True)
    clock.since()
    _backward.stage_backward((y_1D,), (torch.ones(1, 3),), (x_1D,))
    assert clock.since() == [B, W]


def test_gradient_of_a_loss_leaves_in_whole_memory(stage):
    x_1D, y_1D = forward(stage)
    (gradient_1D,) = torch.autograd.grad(y_1D.sum(), x_1D)
    assert gradient_1D.is_contiguous()


def test_clock_takes_what_it_overslept_off_the_next_sleep(monkeypatch):
    now_s, slept_s = [0.0], []

    def sleep(duration_s):
        slept_s.append(duration_s)
        now_s[0] += duration_s + 0.0001

    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("time.sleep", sleep)
    clock = Clock()
    for _ in range(10):
        clock.spend(0.01)
    assert now_s[0] == pytest.approx(10 * 0.01 + 0.0001)
    assert slept_s[1:] == pytest.approx([0.0099] * 9)
