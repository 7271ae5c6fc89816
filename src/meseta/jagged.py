"""Former name of `meseta.sparse`."""

raise ModuleNotFoundError(
    "meseta.jagged is now meseta.sparse; change the import",
    name=__name__,
)
