"""Folders of checkpoints as files: what counts as one, what is found out, what goes."""

import pytest

from rrfp_jax.checkpoint.folder import CheckpointFolder, measure, problems, read_manifest


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def commit(folder, step, content=b"1234567890"):
    written = folder.temporary(step, "token")
    (written / "parameters" / "d").mkdir(parents=True)
    (written / "parameters" / "d" / "large").write_bytes(content)
    (written / "small").write_text("x")
    folder.commit(step, "token", measure(written))


def test_no_folder_has_no_steps(folder):
    assert folder.steps() == []
    assert folder.discard_leftovers() == []


def test_committed_steps_are_intact_and_listed_in_order(folder):
    for step in (10, 9, 100):
        commit(folder, step)
    assert folder.steps() == [9, 10, 100]
    assert [*problems(folder.at(9))] == []
    assert set(read_manifest(folder.at(9))) == {"parameters/d/large", "small"}


def test_what_is_not_complete_is_no_step_and_is_removed(folder):
    commit(folder, 1)
    left = folder.temporary(2, "dead")
    (left / "parameters").mkdir(parents=True)
    assert folder.steps() == [1]
    assert folder.discard_leftovers() == [left.name]
    assert not left.exists()
    assert folder.steps() == [1]


def test_a_flipped_bit_is_found(folder):
    commit(folder, 3)
    large = folder.at(3) / "parameters" / "d" / "large"
    data = bytearray(large.read_bytes())
    data[4] ^= 1
    large.write_bytes(data)
    assert [*problems(folder.at(3))] == ["parameters/d/large does not match its checksum"]


def test_truncated_and_missing_files_are_found(folder):
    commit(folder, 3)
    (folder.at(3) / "parameters" / "d" / "large").write_bytes(b"123")
    (folder.at(3) / "small").unlink()
    assert [*problems(folder.at(3))] == [
        "parameters/d/large has 3 bytes instead of 10",
        "small is missing",
    ]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "it has no manifest.json"),
        (lambda path: path.write_text("{}"), "cannot be read"),
        (lambda path: path.write_text("[1]"), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
        (
            lambda path: path.write_text(path.read_text().replace("10", "11")),
            "does not match its own checksum",
        ),
    ],
)
def test_a_manifest_that_cannot_be_believed_is_found(folder, damage, words):
    commit(folder, 3)
    damage(folder.at(3) / "manifest.json")
    (problem,) = problems(folder.at(3))
    assert words in problem


def test_an_empty_folder_with_the_name_of_a_step_is_found(folder):
    folder.at(9).mkdir(parents=True)
    assert [*problems(folder.at(9))] == ["it has no manifest.json"]


def test_shares_of_a_verification_cover_every_file_once(folder):
    commit(folder, 3)
    (folder.at(3) / "small").write_text("y")
    (folder.at(3) / "parameters" / "d" / "large").write_bytes(b"")
    found = [[*problems(folder.at(3), part=part, of=3)] for part in range(3)]
    assert [len(each) for each in found] == [1, 1, 0]


def test_a_damaged_step_of_the_same_number_is_set_aside_and_not_overwritten(folder):
    for _ in range(3):
        commit(folder, 7, b"first")
    assert folder.steps() == [7]
    assert {p.name for p in folder.path.iterdir()} == {"7", "7.damaged", "7.damaged-2"}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(1, 0, [6]), (2, 0, [5, 6]), (2, 2, [2, 4, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)
def test_pruning_keeps_the_last_and_every_nth(folder, keep_last, keep_every, left):
    for step in range(1, 7):
        commit(folder, step)
    gone = folder.prune(keep_last=keep_last, keep_every=keep_every)
    assert folder.steps() == left
    assert sorted(gone + left) == [1, 2, 3, 4, 5, 6]
    assert {p.name for p in folder.path.iterdir()} == {*map(str, left)}
