"""`python -m vllm_megaattn COMMAND`: see vllm_megaattn.cli."""

from vllm_megaattn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
