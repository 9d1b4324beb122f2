"""What is measured is what Ray would pack, and what is too large is named."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.cluster_check import check_cluster
from pipelines.upload import check_upload, measure_upload, readable
from storage.errors import UserError
from tests.cluster.conftest import ROOT, SHIPPED

MB = 2**20


def sparse(path: Path, size: int) -> None:
    """A file of that size which takes no disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in ("run.yaml", "code/a.py", "code/.rayignore", "code/scratch/b.py", "runs/x/model.bin", ".gitignore"):
        sparse(root / name, 1000)
    for name in (".git/objects/pack", ".venv/lib/torch.so", "code/__pycache__/a.pyc"):
        sparse(root / name, 5 * MB)
    (root / ".gitignore").write_text("/runs/\n")
    (root / "code/.rayignore").write_text("scratch/*\n!scratch/kept.py\n")
    sparse(root / "code/scratch/kept.py", 1000)
    return root


def packed_by_ray(root: Path, target: Path) -> zipfile.ZipFile:
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    excludes = get_runtime_env_default_excludes()
    create_package(str(root), target, True, excludes=excludes, logger=logging.getLogger("quiet"))
    return zipfile.ZipFile(target)


def test_size_and_files_are_those_of_rays_own_archive(project: Path, tmp_path: Path) -> None:
    upload = measure_upload(project)
    archive = packed_by_ray(project, tmp_path / "package.zip")
    files = {entry.filename for entry in archive.infolist() if not entry.is_dir()}
    assert files == {".gitignore", "run.yaml", "code/.rayignore", "code/a.py", "code/scratch/kept.py"}
    assert upload.files == len(files)
    assert upload.size == pytest.approx((tmp_path / "package.zip").stat().st_size, abs=200)


def test_gitignore_counts_unless_ray_is_told_to_ignore_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure_upload(project).files
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    assert measure_upload(project).files == before + 1  # runs/x/model.bin


def test_largest_parts_are_narrowed_to_where_the_bytes_are(project: Path) -> None:
    sparse(project / "data/raw/2024/all.jsonl", 3 * MB)
    sparse(project / "cache/a/one.npy", MB)
    sparse(project / "cache/b/two.npy", MB)
    names = [name for name, _ in measure_upload(project).largest]
    assert names[:2] == ["data/raw/2024/all.jsonl", "cache/"]
    assert len(names) == 5


def test_too_large_an_upload_is_refused_and_names_its_parts(project: Path) -> None:
    sparse(project / "outputs/step_1/weights.safetensors", 80 * MB)
    sparse(project / "outputs/step_2/weights.safetensors", 80 * MB)
    sparse(project / "corpus.jsonl", 30 * MB)
    with pytest.raises(UserError) as error:
        check_upload(project)
    lines = str(error.value).splitlines()
    assert "190.0 MiB in 8 files" in lines[0]
    assert lines[1].split() == ["160.0", "MiB", "outputs/"]
    assert lines[2].split() == ["30.0", "MiB", "corpus.jsonl"]
    assert str(project / ".rayignore") in lines[-1]
    (project / ".rayignore").write_text("outputs/\n")
    assert check_upload(project).size < 31 * MB


def test_cluster_check_refuses_too_large_an_upload(project: Path, home: Path) -> None:
    sparse(project / "weights/w.bin", 101 * MB)
    with pytest.raises(UserError, match=r"101\.0 MiB +weights/w\.bin"):
        check_cluster(SHIPPED["local"], directory=project, console=Console(quiet=True))


def test_a_working_directory_that_is_none(project: Path) -> None:
    with pytest.raises(UserError, match=r"run\.yaml: is not a directory"):
        measure_upload(project / "run.yaml")


def test_this_checkout_uploads_code_and_nothing_else() -> None:
    upload = measure_upload(ROOT)
    assert upload.size < 10 * MB
    assert {name.split("/")[0] for name, _ in upload.largest} >= {"actors", "pipelines", "storage"}


def test_sizes_as_people_write_them() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 100 * MB, 3 * 2**30)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "100.0 MiB",
        "3.0 GiB",
    ]
