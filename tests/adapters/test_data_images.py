"""Folders of images as data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.data.file import FileSource
from onnx_ops.domain.pipeline import FileData
from onnx_ops.errors import NotFoundError, UserError
from tests.support.images import draw_pixels, encode_image

PNG = encode_image(draw_pixels(12, 20))
JPEG = encode_image(draw_pixels(8, 8, seed=1), "JPEG")
SECTION = FileData(file="images")


def write_images(root: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = root / "images" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root / "images"


def test_load_images_returns_rows_of_bytes_in_order_of_paths(tmp_path: Path) -> None:
    write_images(tmp_path, b_png=PNG, a_jpg=JPEG)
    arrays = FileSource().load(SECTION, tmp_path)
    assert list(arrays) == ["image", "file_name"]
    assert arrays["file_name"].tolist() == ["a.jpg", "b.png"]
    assert arrays["image"].shape == (2, max(len(PNG), len(JPEG)))
    assert arrays["image"][0].tobytes()[: len(JPEG)] == JPEG
    assert not any(arrays["image"][0][len(JPEG) :])
    assert arrays["image"][1].tobytes()[: len(PNG)] == PNG


def test_load_images_in_folders_returns_names_of_folders_as_labels(tmp_path: Path) -> None:
    write_images(tmp_path, dog__1_png=PNG, cat__1_jpeg=JPEG)
    arrays = FileSource().load(SECTION, tmp_path)
    assert arrays["label"].tolist() == ["cat", "dog"]


def test_load_and_sample_images_with_table_return_columns_in_order_of_images(
    tmp_path: Path,
) -> None:
    folder = write_images(tmp_path, b_png=PNG, a_jpg=JPEG)
    (folder / "metadata.csv").write_text("file_name,class\nb.png,1\na.jpg,0\n")
    arrays = FileSource().load(SECTION, tmp_path)
    assert arrays["class"].ravel().tolist() == [0, 1]
    sample = FileSource().sample(SECTION, tmp_path)
    assert sample is not None
    assert sample.arrays["class"].ravel().tolist() == [0, 1]
    assert not sample.whole


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ("name,class\nb.png,1\na.jpg,0\n", "no column 'file_name'"),
        ("file_name,class\nb.png,1\n", "no row for 'a.jpg'"),
        (
            "file_name,class\nb.png,1\na.jpg,0\nc.png,0\n",
            "'c.png', which is not a PNG or JPEG file",
        ),
        ("file_name,class\nb.png,1\na.jpg,0\na.jpg,1\n", "'a.jpg' more than once"),
        ("file_name,image\nb.png,1\na.jpg,0\n", "the name 'image' is reserved"),
    ],
)
def test_load_images_with_invalid_table_raises_user_error(
    tmp_path: Path, table: str, cause: str
) -> None:
    folder = write_images(tmp_path, b_png=PNG, a_jpg=JPEG)
    (folder / "metadata.csv").write_text(table)
    with pytest.raises(UserError, match=cause):
        FileSource().load(SECTION, tmp_path)


@pytest.mark.parametrize("content", [b"", PNG[:60], JPEG[:-30], b"GIF89a"])
def test_load_undecodable_image_raises_user_error_with_its_path(
    tmp_path: Path, content: bytes
) -> None:
    write_images(tmp_path, dog__bad_png=content, dog__good_png=PNG)
    with pytest.raises(UserError) as caught:
        FileSource().load(SECTION, tmp_path)
    assert str(tmp_path / "images" / "dog/bad.png") in str(caught.value)


def test_load_folder_without_images_raises_not_found_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(NotFoundError, match="contains neither images"):
        FileSource().load(SECTION, tmp_path)
