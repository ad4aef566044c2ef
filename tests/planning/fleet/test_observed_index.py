"""The events of an observed index rebuild the index."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefix_view import PrefixView
from planning.fleet.observed_index import ObservedIndex, short_digest

DIGESTS = [bytes([i]) * 32 for i in range(6)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "forget", "withdraw", "take"]), st.integers(0, 5), st.integers(0, 5))
    )
)
def test_a_view_of_the_events_equals_the_index(actions: list[tuple[str, int, int]]) -> None:
    index, view = ObservedIndex(16), PrefixView()
    for action, block, digest in [*actions, ("take", 0, 0)]:
        match action:
            case "publish":
                index.publish(block, DIGESTS[digest])
            case "forget":
                index.forget(block)
            case "withdraw":
                index.withdraw(block)
            case "take":
                assert view.apply(view.sequence_number + 1, *index.take_changes())
                held = {short_digest(each) for each, _ in index.items()}
                assert {short_digest(each) for each in DIGESTS if view.num_cached([short_digest(each)])} == held
                assert len(view) == len(index)
    assert index.take_changes() == ([], [])
