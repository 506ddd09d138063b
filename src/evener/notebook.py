"""HTML for values that a notebook displays. Pure."""

from collections.abc import Sequence
from html import escape


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a small table as HTML, for ``_repr_html_``.

    Args:
        caption: Its title.
        head: Names of the columns.
        rows: Cells by row, shown as text.
    """
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
