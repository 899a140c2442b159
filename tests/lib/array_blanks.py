"""What may stand for the blanks in lines of array code: numbers, axes, dtypes, indices, names of functions."""

from __future__ import annotations

from typing import Final

BLANKS: Final[dict[str, tuple[str, ...]]] = {
    "number": ("2", "1", "0", "-1", "3", "0.5", "-0.0", "True", "1j", "float('nan')", "float('inf')", "300"),
    "small": ("0", "1", "2", "-1"),
    "bool": ("False", "True"),
    "axis": ("0", "-1", "1"),
    "axes": ("None", "0", "-1", "1", "(0, 1)", "(-1, 0)", "()"),
    "keep": ("", "", ", keepdims=True"),
    "where": ("", "", ", where=b > 0", ", where=b != 0", ", where=new('bool', (3,), 2)"),
    "order": ("'C'", "'F'", "'K'", "'A'"),
    "dtype": ("'float64'", "'float32'", "'float16'", "'int64'", "'int8'", "'uint8'", "'bool'", "'complex64'"),
    "kind": ("'same_kind'", "'unsafe'", "'safe'", "'no'"),
    "shape": ("(-1,)", "(3, -1)", "(-1, 3)", "(1, -1, 1)", "(3,)", "(2, 3)", "()", "(3, 0)"),
    "count": ("1", "2", "0", "3"),
    "sizes": ("2", "[1, 2]", "[0, 1]", "3"),
    "plain": (
        "new('float64', (3,), 2)",
        "new('int64', (3,), 0)",
        "new('float32', (), 2)",
        "new('bool', (2, 1), 2)",
        "new('complex128', (2, 3), 1, 'F')",
        "new('uint8', (), 0, 'scalar')",
    ),
    # Indexing
    "part": ("0", "-1", "1", "1:", ":-1", "::-1", "::2", ":", "1:1", "5", "None", "...", "True"),
    "fancy": ("[0, -1]", "[[1], [0]]", "[]", "[True, False, True]", "[True, False]", "new('int64', (2, 2), 3)", "b"),
    "mask": ("a > 0", "b", "a != a", "b > 0", "new('bool', (3,), 2)", "~(b > 0)"),
    "index": (
        "{part}",
        "{part}, {part}",
        "{part}, {part}, {part}",
        "...,",
        "()",
        "{mask}",
        "{fancy}",
        "{fancy}, {part}",
        "{part}, {fancy}",
        "{fancy}, {fancy}",
        "..., {mask}",
        "{mask}, {part}",
        "{fancy}, None, {part}",
        "slice(b, None)",
        "b, c",
        "b, {part}",
    ),
    # Names
    "operator": ("+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>", "@"),
    "comparison": ("==", "!=", "<", "<=", ">", ">="),
    "unary": tuple(
        "negative positive absolute fabs sign sqrt cbrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos "
        "tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh floor ceil trunc rint isnan isinf isfinite "
        "signbit logical_not invert conjugate spacing deg2rad rad2deg degrees radians bitwise_count isnat".split()
    ),
    "binary": tuple(
        "add subtract multiply divide floor_divide remainder fmod power float_power maximum minimum fmax fmin hypot "
        "arctan2 copysign nextafter ldexp logaddexp logaddexp2 heaviside gcd lcm bitwise_and bitwise_or bitwise_xor "
        "left_shift right_shift equal not_equal less less_equal greater greater_equal logical_and logical_or "
        "logical_xor".split()
    ),
    "product": ("matmul", "dot", "inner", "vdot", "outer", "kron", "vecdot", "matvec", "vecmat", "cross"),
    "folding": ("add", "multiply", "maximum", "minimum", "logical_and", "logical_or", "bitwise_xor", "hypot", "gcd"),
    "reduction": ("sum", "prod", "max", "min", "mean", "std", "var", "any", "all", "argmax", "argmin"),
    "nanreduction": tuple(f"nan{name}" for name in "sum prod max min mean std var median argmax argmin".split()),
    "running": ("cumsum", "cumprod", "cumulative_sum", "cumulative_prod", "nancumsum", "nancumprod"),
    "complexity": ("real", "imag", "angle", "isreal", "iscomplex", "iscomplexobj", "isrealobj", "real_if_close"),
    "elementwise": tuple(
        "abs fix sinc i0 nan_to_num isneginf isposinf ones_like zeros_like copy unwrap ravel squeeze transpose "
        "flip fliplr flipud rot90 trim_zeros sort_complex atleast_1d atleast_2d atleast_3d matrix_transpose "
        "diagflat diag diagonal tril triu nonzero argwhere flatnonzero count_nonzero ediff1d diff trace median ptp "
        "sort argsort unique unique_values unique_counts unique_inverse unique_all cov corrcoef size shape ndim "
        "vander gradient average trapezoid amax amin around unstack".split()
    ),
    "pairwise": tuple(
        "isclose allclose array_equal array_equiv union1d intersect1d setdiff1d setxor1d isin convolve correlate "
        "polyadd polysub polymul polydiv polyval append searchsorted digitize broadcast_arrays meshgrid tensordot "
        "extract compress where result_type common_type shares_memory may_share_memory resize lexsort".split()
    ),
    "joining": ("concatenate", "stack", "vstack", "hstack", "dstack", "column_stack", "block"),
    "splitting": ("split", "array_split"),
    "named split": ("hsplit", "vsplit", "dsplit"),
    "linear": tuple(
        "inv det slogdet cholesky eig eigh eigvals eigvalsh qr svd svdvals pinv cond matrix_rank norm matrix_norm "
        "vector_norm matrix_transpose diagonal trace tensorinv".split()
    ),
    "linear pair": ("solve", "outer", "cross", "tensordot", "vecdot", "matmul", "lstsq", "tensorsolve"),
    "transform": ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"),
    "transforms": ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn", "fftshift", "ifftshift"),
    "method": tuple(
        "conj() conjugate() copy() flatten() ravel() squeeze() transpose() nonzero() trace() diagonal() byteswap() "
        "argsort() item() tolist() tobytes() all() any() round() cumsum() cumprod() mean() std() var() max() min() "
        "argmax() argmin() sum() prod() view() __len__() to_device('cpu') __array_namespace__().asarray(1.0).ndim "
        "nothing()".split()
    ),
    "attribute": tuple("T mT real imag shape dtype ndim size itemsize nbytes strides device".split()),
}
"""Name of a blank -> the texts that it may stand for, the simplest first."""
