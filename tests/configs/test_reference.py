"""docs/configuration.md says what the schema says."""

from pathlib import Path

from capo.configs.reference import lines

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_schema_gives() -> None:
    assert FILE.read_text(encoding="utf-8") == "\n".join(lines()), (
        "run: python -m capo.configs.reference > docs/configuration.md"
    )


def test_every_key_is_on_the_page() -> None:
    page = FILE.read_text(encoding="utf-8")
    for key in ("max_staleness", "token_budget", "clip_low", "num_kv_heads", "key_file"):
        assert f"| `{key}` |" in page
