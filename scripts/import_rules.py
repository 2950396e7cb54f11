"""The import rule of this repository, as a contract of import-linter (configured in pyproject.toml).

import-linter's own contracts name what is forbidden; ours names what is allowed, so that a module added tomorrow is
covered as well. Knows nothing of what the modules do.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyImports(Contract):
    """`importer` and everything below it may import, of this repository, only itself and `may_import`.

    Only direct imports are looked at: each package has a rule of its own, which makes the rules transitive.
    """

    importer = fields.StringField()
    may_import = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        importer = str(self.importer)
        allowed = [importer, *map(str, self.may_import)]  # type: ignore[call-overload]
        broken = [
            (module, imported)
            for module in sorted(graph.modules)
            if _inside(module, importer)
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if not any(_inside(imported, package) for package in allowed)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported in check.metadata["broken"]:
            output.print_error(f"{module} must not import {imported}", bold=False)
            output.new_line()


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
