import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrl.errors import GraphError
from graphrl.keys import decode_key, encode_key, normalize_key, normalize_keys

parts = st.text(alphabet="ab/~01._", min_size=1, max_size=6) | st.text(min_size=1, max_size=6)
keys = parts | st.lists(parts, min_size=2, max_size=4).map(tuple)


@settings(derandomize=True, database=None, max_examples=300)
@given(keys)
def test_encoding_can_be_undone(key):
    assert decode_key(encode_key(key)) == key


@settings(derandomize=True, database=None, max_examples=300)
@given(keys, keys)
def test_different_keys_have_different_names(a, b):
    assert (encode_key(a) == encode_key(b)) == (a == b)


def test_a_dot_is_not_nesting():
    assert encode_key("a.b") == "a.b" and encode_key(("a", "b")) == "a/b" and encode_key("a/b") == "a~1b"


def test_nested_tuples_are_flattened():
    assert normalize_key(("a", ("b", ("c",)))) == ("a", "b", "c")
    assert normalize_key(("a",)) == "a"


def test_a_tuple_is_one_nested_key_and_a_list_is_many():
    assert normalize_keys(("next", "observation")) == [("next", "observation")]
    assert normalize_keys(["next", "observation"]) == ["next", "observation"]
    assert normalize_keys("observation") == ["observation"]


@pytest.mark.parametrize("wrong", ["", (), ("a", ""), 3, ("a", 3), None])
def test_what_is_no_key_is_refused(wrong):
    with pytest.raises(GraphError, match="is not a key"):
        normalize_key(wrong)


def test_what_is_no_list_of_keys_is_refused():
    with pytest.raises(GraphError, match=r"3 \(int\) is not a list of keys"):
        normalize_keys(3)
