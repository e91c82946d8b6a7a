"""The base of all layers: declaring, walking, sharding arithmetic."""

import pytest
import torch

from minisgl.layers.base import Layer, Piece, shard_range, shard_size
from minisgl.layers.rope_config import RopeConfig
from minisgl.models.config import ModelConfig
from support.forward import build_context


@pytest.fixture
def context():
    rope = RopeConfig(rope_type="default", theta=100.0, rotary_dim=4, original_max_position=16)
    config = ModelConfig(
        architecture="Test",
        vocab_size=7,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=16,
        rms_norm_eps=1e-6,
        activation="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=None,
        sliding_windows=(None,),
        dtype="float32",
        rope=rope,
    )
    return build_context(config)


class Leaf(Layer):
    def __init__(self, context, name):
        super().__init__()
        whole = (slice(0, 3),)
        self.weight = self.declare("weight", (3, 2), [Piece(name, (3, 2), whole, whole)], context)


class Tree(Layer):
    def __init__(self, context):
        super().__init__()
        self.first = Leaf(context, "a")
        self.list = [Leaf(context, "b"), Leaf(context, "c")]
        self.again = self.first


def test_walk_is_in_order_and_meets_shared_layers_once(context):
    names = [piece.name for weight in Tree(context).weights() for piece in weight.pieces]
    assert names == ["a", "b", "c"]


def test_uncovered_parts_start_at_zero(context):
    layer = Layer()
    piece = Piece("a", (5, 2), (slice(3, 5),), (slice(0, 2),))
    weight = layer.declare("weight", (3, 2), [piece], context)
    assert torch.equal(weight, torch.zeros(3, 2))


@pytest.mark.parametrize("shape", [(6, 2), (2, 6), (3, 6, 2)])
def test_layout_of_matrices_changes_no_shape_and_no_product(context, shape):
    layer = Layer()
    weight = layer.declare("weight", shape, [], context, matrix=True)
    assert weight.shape == shape
    values = torch.randn(shape)
    weight.copy_(values)
    x = torch.randn(4, shape[-1])
    torch.testing.assert_close(x @ weight.mT, x @ values.mT)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("total", [1, 7, 8, 37, 263])
def test_shards_cover_everything_once_and_fit(total, size):
    ranges = [shard_range(total, rank, size) for rank in range(size)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    assert max(stop - start for start, stop in ranges) == shard_size(total, size)
