"""The result of a query, in the table library the caller works with."""

from typing import TYPE_CHECKING, Any

from rlk_ledger_schemas.errors import UsageError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


class Result:
    """Rows of a read-only query; anything it does not define itself is the DuckDB relation's."""

    def __init__(self, relation: "duckdb.DuckDBPyRelation") -> None:
        self._relation = relation

    def arrow(self) -> "pa.Table":
        """Every row as a pyarrow Table, whatever the version of DuckDB; raises UsageError as `Ledger.sql` does."""
        from rlk_ledger.views import fetch

        return fetch(self._relation)

    def df(self) -> Any:
        """Every row as a pandas DataFrame; raises UsageError where pandas is not installed."""
        _need("pandas", "df")
        return self.arrow().to_pandas()

    def pl(self) -> Any:
        """Every row as a polars DataFrame; raises UsageError where polars is not installed."""
        return _need("polars", "pl").from_arrow(self.arrow())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._relation, name)

    def __len__(self) -> int:
        return len(self._relation)

    def __repr__(self) -> str:
        return repr(self._relation)


def _need(library: str, method: str) -> Any:
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError:
        raise UsageError(
            f"sql().{method}() needs {library}: pip install {library}, or take .arrow(), which needs nothing more."
        ) from None
