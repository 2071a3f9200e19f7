"""Copies of models that hold a Buffer, and attempts to pickle one."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import hybrid_ep
from hybrid_ep.moe import MoELayer
from tests import targets
from tests.cases import Case
from tests.checks import same_bytes
from tests.ranks import layers

pytestmark = pytest.mark.not_on("torch_gpu", why=targets.SAME_PYTHON)

CASE = Case("copies", num_ranks=1, topk=3, dtype=torch.float32, max_rows="third")
REFUSED = "a hybrid_ep.Buffer must not be pickled: .* Save model.state_dict"


@pytest.fixture
def layer(alone) -> MoELayer:
    return MoELayer(alone.buffer(**CASE.sizes()), ffn_hidden=8)


def tokens(alone) -> torch.Tensor:
    return CASE.values(0, "x", CASE.num_tokens(0)).to(alone.device)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_Buffer_is_the_Buffer(layer, make):
    assert make(layer.buffer) is layer.buffer
    assert make([layer.buffer])[0] is layer.buffer


def test_a_deep_copy_of_a_model_has_weights_of_its_own_and_the_same_Buffer(alone, layer):
    twin = copy.deepcopy(layer)
    assert twin.buffer is layer.buffer
    x = tokens(alone)
    want = layer(x).y
    same_bytes(twin(x).y, want, "y of the copy")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    same_bytes(twin(x).y, want, "y of the copy after the original changed")


def test_a_moving_average_of_a_model(alone, layer):
    average = AveragedModel(layer)
    with torch.no_grad():
        layer.experts.w1.mul_(2)
    average.update_parameters(layer)
    assert average.module.buffer is layer.buffer
    assert average(tokens(alone)).y.isfinite().all()


def test_ranks_that_copy_a_model_call_together(world):
    """The copy makes the calls of the Buffer that it shares, in step with the peers."""
    for original, copied in world(2).run(layers.copied, CASE.on(2)):
        same_bytes(copied, original, "y of the copy")


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickling_a_Buffer_is_refused(layer, protocol):
    with pytest.raises(TypeError, match=REFUSED):
        pickle.dumps(layer.buffer, protocol)


def test_saving_a_whole_model_is_refused_and_its_state_is_saved(layer):
    with pytest.raises(TypeError, match=REFUSED):
        torch.save(layer, io.BytesIO())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    layer.load_state_dict(torch.load(file))


def test_passing_a_model_to_a_child_process_is_refused(layer):
    child = multiprocessing.get_context("spawn").Process(target=print, args=(layer,))
    with pytest.raises(TypeError, match=REFUSED):
        child.start()


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))]
)
def test_a_copied_handle_leads_home(alone, layer, make):
    """A handle is data alone: a copy serves the same Buffer as the original does."""
    inputs = CASE.inputs(0)
    x, topk_idx = tokens(alone), inputs.topk_idx.to(alone.device)
    out = hybrid_ep.dispatch(layer.buffer, x, topk_idx, max_rows=64)
    handle = make(out.handle)
    same_bytes(
        hybrid_ep.combine(layer.buffer, out.rows, handle),
        hybrid_ep.combine(layer.buffer, out.rows, out.handle),
        "y",
    )
    same_bytes(hybrid_ep.dispatch(layer.buffer, x, handle=handle).rows, out.rows, "rows")
