"""What is refused before any key is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import ConfigError


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "stage.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "max_num_seqs: 8\nconnector:\n  codec_chunk_frames: 10\nvocoder_cudagraph:\n")
    config = StageConfig.from_yaml(path)
    assert (config.max_num_seqs, config.connector.codec_chunk_frames) == (8, 10)
    assert StageConfig.from_yaml(str(path)) == config


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    """Also where the overriding mapping is itself merged elsewhere before it is built."""
    content = """
    vocoder_cudagraph:
      targets:
        a.x: &x {<<: {enabled: false, max_extra_graphs: 1}, max_extra_graphs: 2}
        a.y: {<<: *x, enabled: true}
    connector:
      <<: {codec_chunk_frames: 5, codec_left_context_frames: 3}
      codec_chunk_frames: 10
    """
    config = StageConfig.from_yaml(written(tmp_path, content))
    assert (config.connector.codec_chunk_frames, config.connector.codec_left_context_frames) == (10, 3)
    targets = config.vocoder_cudagraph.targets
    assert [(targets[name].enabled, targets[name].max_extra_graphs) for name in ("a.x", "a.y")] == [(False, 2), (True, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seqs: 8\nasync_chunk: true\nmax_num_seqs: 9\n", r"line 3 repeats the key 'max_num_seqs' of line 1"),
        ("connector:\n  codec_chunk_frames: 1\n  'codec_chunk_frames': 2\n", r"line 3 repeats the key 'codec_chunk_frames' of line 2"),
        ("vocoder_cudagraph:\n  targets: {a.b: {enabled: true}, a.b: {}}\n", r"line 2 repeats the key 'a.b' of line 2"),
        ("", r"is empty\. Write the keys"),
        ("# only a comment\n", r"is empty"),
        ("- max_num_seqs\n", r"must hold keys and values, got \['max_num_seqs'\]"),
        ("max_num_seqs", r"must hold keys and values, got 'max_num_seqs'"),
        ("8: max_num_seqs\n", r"keys must be strings, got 8"),
        ("connector: {1: 2}\n", r"connector: keys must be strings, got 1"),
        ("connector: [1]\n", r"connector: must hold keys and values, got \[1\]"),
        ("max_num_seqs: [8\n", r"is not YAML that can be read here: .*line 2"),
        ("a: 1\n---\nb: 2\n", r"is not YAML that can be read here: expected a single document"),
        ("max_num_seqs: 2024-99-99\n", r"is not YAML that can be read here: month must be"),
        ("max_num_seqs: !!python/object/apply:os.getcwd []\n", r"is not YAML that can be read here: could not determine a constructor"),
        ("? [a]\n: 1\n", r"is not YAML that can be read here: .*unhashable key"),
        (b"\xff\xfe\x00", r"is not text in UTF-8"),
        ("max_num_seqs: \x00\n", r"is not YAML that can be read here"),
        ("[" * 5000, r"is nested too deeply"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        StageConfig.from_yaml(written(tmp_path, content))


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    written(tmp_path, "max_num_seqs: 8")
    with pytest.raises(ConfigError, match=r"stages\.yaml: no such file\. Did you mean 'stage\.yaml'\?"):
        StageConfig.from_yaml(tmp_path / "stages.yaml")
    with pytest.raises(ConfigError, match=r"no such file\.$"):
        StageConfig.from_yaml(tmp_path / "absent" / "stage.yaml")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        StageConfig.from_yaml(tmp_path)


def test_two_merges_in_one_mapping(tmp_path: Path) -> None:
    path = written(tmp_path, "a: &a {max_num_seqs: 8}\nb: &b {max_num_seqs: 9}\nstage:\n  <<: *a\n  <<: *b\n")
    with pytest.raises(ConfigError, match="line 5 repeats the key '<<' of line 4"):
        StageConfig.from_yaml(path)


@pytest.mark.parametrize("count", [65_537, 10**20])
def test_more_requests_than_any_table_holds(count: int) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: Input should be less than or equal to 65536"):
        StageConfig.from_dict({"max_num_seqs": count})
