"""Package map of Chunk Planner.

The folders `planner/` and `kernels/` install as `chunk_planner` and `chunk_planner.kernels`:
a top-level package called `kernels` would shadow Hugging Face's package of that name inside
a vLLM environment.
"""

from pathlib import Path

from setuptools import setup

setup(
    name="chunk-planner",
    version="0.1.0",
    description="Plans, measures and explains vLLM's prefill chunks for hybrid models",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"chunk_planner": "planner", "chunk_planner.kernels": "kernels"},
    packages=[
        "chunk_planner",
        "chunk_planner.cli",
        "chunk_planner.engine",
        "chunk_planner.geometry",
        "chunk_planner.kernels",
        "chunk_planner.models",
        "chunk_planner.tables",
    ],
    package_data={
        "chunk_planner": ["py.typed"],
        "chunk_planner.models": ["*.json"],
        "chunk_planner.tables": ["*.json"],
    },
    install_requires=["numpy>=1.24", "rich>=13", "jsonschema>=4.20", "platformdirs>=4"],
    extras_require={
        "kernels": ["torch", "triton"],
        "engine": ["vllm", "scipy>=1.10"],
        "plot": ["matplotlib>=3.7"],
        "test": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "build", "scipy>=1.10"],
    },
    entry_points={
        "console_scripts": ["chunk-planner = chunk_planner.cli:main"],
        "vllm.general_plugins": ["chunk_planner = chunk_planner.engine.plugin:register"],
    },
)
