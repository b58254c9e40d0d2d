"""Where a binary's runtime has its state, whatever can be probed in it."""

from schedtrace.runtime_plan import RuntimePlan
from schedtrace.runtime_plan import make_runtime_plan as make
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import read_buildinfo
from schedtrace.symbols.layout import layout_of
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.runtime_data import RuntimeData, find_runtime_data
from schedtrace.symbols.symtab import Symtab


def make_runtime_plan(path: str) -> RuntimePlan:
    """Of the Go executable or shared object at ``path``. Raises NotTraceable, saying why there is none."""
    with Binary.open(path) as binary:
        table, version = Pclntab.find(binary), read_buildinfo(binary).version
        layout = layout_of(binary, version)
        symtab = Symtab.read(binary)

        def find() -> RuntimeData:
            assert layout  # it asks for nothing without
            return find_runtime_data(binary, table, symtab, layout)

        return make(binary, table, version, layout, find)
