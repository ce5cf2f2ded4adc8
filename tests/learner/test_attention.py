import pytest
import torch
from torch import nn

from capo.learner.attention import varlen_attention

BOUNDS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)


def heads(count, seed):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(1, count, 9, 8, generator=generator, dtype=torch.float64)
    return states.requires_grad_()


def slow(query, key, value, scaling):
    """Softmax over an explicit mask: the same segment, and not later."""
    segment = torch.bucketize(torch.arange(9), BOUNDS[1:], right=True)
    allowed = (segment[:, None] == segment[None]) & torch.ones(9, 9).tril().bool()
    group = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        scores = query[0, head] @ key[0, head // group].T * scaling
        outputs.append(
            scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value[0, head // group]
        )
    return torch.stack(outputs, dim=1)[None]


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_output_and_gradient_are_those_of_a_masked_softmax(query_heads, key_heads):
    states = heads(query_heads, 0), heads(key_heads, 1), heads(key_heads, 2)
    out, weights = varlen_attention(
        nn.Module(), *states, None, cu_seq_lens_q=BOUNDS, scaling=0.3, max_length_q=5
    )
    assert weights is None
    expected = slow(*states, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, states, upstream)
    for one, other in zip(ours, torch.autograd.grad(expected, states, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_it_cannot_do_is_refused():
    states = heads(2, 0), heads(2, 1), heads(2, 2)
    with pytest.raises(ValueError, match="no attention mask and no dropout"):
        varlen_attention(nn.Module(), *states, torch.ones(9, 9), cu_seq_lens_q=BOUNDS)
    with pytest.raises(ValueError, match="no attention mask and no dropout"):
        varlen_attention(nn.Module(), *states, None, cu_seq_lens_q=BOUNDS, dropout=0.1)
    with pytest.raises(ValueError, match=r"segment of 5 tokens is longer than .* window of 4"):
        varlen_attention(nn.Module(), *states, None, cu_seq_lens_q=BOUNDS, sliding_window=4)
    varlen_attention(nn.Module(), *states, None, cu_seq_lens_q=BOUNDS, sliding_window=5)
