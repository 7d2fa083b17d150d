"""The migration pages are what their table makes, and nothing is beside them."""

from tools.pages import migration


def test_the_pages_are_what_the_table_makes():
    made = migration.pages()
    assert {path: path.read_text() for path in made} == made
    assert set(migration.FOLDER.glob("*.md")) == set(made) - {migration.FOLDER.with_suffix(".md")}
