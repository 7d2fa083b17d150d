"""The contract of each operation of `native.py` but `hopper_gemm_`, and the operation in torch's own functions.

The functions here run in variants that come without a compiled library. The contracts are those of compiled operations,
too; `native.py` says what holds for all of them, and what is different here.
"""
