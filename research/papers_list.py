"""The numbered statements of the five papers, for papers.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One of three: shown by a test, decided on a page of results, or not tried for a reason."""

    name: str
    text: str
    test: str = ""
    verdict: str = "holds"
    command: str = ""
    page: str = ""
    claims: tuple[str, ...] = ()
    reason: str = ""


def _test(name: str, text: str, test: str, verdict: str = "holds", command: str = "") -> Item:
    return Item(name, text, test=test, verdict=verdict, command=command)


def _page(name: str, text: str, page: str, *claims: str) -> Item:
    return Item(name, text, page=page, claims=claims)


def _not(name: str, text: str, reason: str) -> Item:
    return Item(name, text, reason=reason)


_THEORY = "theory/test_theory_{}.py".format
_LEVELS = "levels/test_levels_{}.py".format
_TIMES = "times on GPUs of another cluster; [performance](performance.md) has this package's"
_IMAGENET = "ImageNet is not at hand"
_NO_CLAIM = "a listing of settings, no claim"
_DRAWING = "a drawing of the method"

ALQ = [
    _test("Algorithm 1", "adaptive data-parallel SGD", "simulate/test_simulate_ranks.py"),
    _test("Eqs 1, 2, Fig. 2", "random rounding and its variance", "kernels/test_rounding.py"),
    _test(
        "Theorem 1",
        "Ψ is not convex; one level given its neighbours is solved in closed form",
        _THEORY("convexity"),
    ),
    _test("Theorem 2", "bound ε_Q on the variance", _THEORY("variance")),
    _test("Theorem 3", "bound on the code length", _THEORY("code_length")),
    _test("Theorem 4", "convergence, convex", _THEORY("convergence"), "mended"),
    _test("Theorem 5", "Huffman codes come within a bit of the entropy", _THEORY("code_length")),
    _test("Theorem 6", "convergence, smooth", _THEORY("convergence"), "mended"),
    _test("Theorem 7", "convergence with momentum, convex", _THEORY("momentum"), "mended"),
    _test("Theorem 8", "convergence with momentum, smooth", _THEORY("momentum")),
    _test("Theorem 9", "bound ε_Q of symmetric tables", _THEORY("variance")),
    _test("Theorem 10", "bound on the code length of symmetric tables", _THEORY("code_length")),
    _test("Lemma 1", "norms of different order", _THEORY("lemmas")),
    _test("Lemma 2", "r (l1 - r) ≤ K_p l1^(2-p) r^p", _THEORY("variance")),
    _test("Lemma 3", "expected number of nonzero coordinates", _THEORY("code_length")),
    _test("Proposition 1", "when two levels' Ψ is convex", _THEORY("convexity"), "mended"),
    _test("Proposition 2", "the best level between two", _LEVELS("descent")),
    _test("Proposition 3", "variance of symmetric tables", "kernels/test_rounding.py"),
    _test("Proposition 4", "Ψ of symmetric tables", _LEVELS("objective")),
    _test("Proposition 5", "the best first level of a symmetric table", _LEVELS("descent")),
    _test("Proposition 6", "probabilities of the symbols", _LEVELS("probabilities")),
    _test(
        "Proposition 7",
        "the worst-case table's gap is Ω(d)",
        _THEORY("convexity"),
        "does not hold under the L2 norm; holds if the law of r stays",
    ),
    _test(
        "Proposition 8",
        "probabilities of the symbols of symmetric tables",
        _LEVELS("probabilities"),
    ),
    _test("Corollary 1", "a uniform law makes Ψ convex", _THEORY("convexity"), "mended"),
    _test("Corollary 2", "the best single level, F⁻¹(1 - E r)", _THEORY("convexity")),
    _test("Corollary 3", "symbol probabilities of truncated normals", _LEVELS("probabilities")),
    _test("Corollary 4", "the same of symmetric tables", _LEVELS("probabilities"), "mended"),
    _test("Definition 1", "symmetric quantisation", "kernels/test_rounding.py"),
    _page(
        "Table 1",
        "adaptive methods are more accurate than fixed ones",
        "results.md",
        "adaptive methods are more accurate than fixed ones on .*[a-zT]$",
    ),
    _page(
        "Table 1",
        "ALQ or ALQ-N matches SuperSGD",
        "results.md",
        "^ALQ(-N)? is within .* on [^(]*[a-zT]$",
    ),
    _page(
        "Table 1",
        "NUQSGD falls behind at bucket size 8192",
        "results.md",
        "^NUQSGD is behind SuperSGD",
    ),
    _page(
        "Table 2",
        "adaptive methods scale to 16 and 32 workers",
        "results.md",
        "with 16 workers",
        "with 32 workers",
    ),
    _not("Table 3", "training settings", _NO_CLAIM),
    _not("Table 4", "full ImageNet run", _IMAGENET),
    _not("Tables 5, 6", "times of steps", _TIMES),
    _not(
        "Table 7, section 5",
        "an update costs 0.4 to 0.5 % of the training time",
        "the share depends on GPU and network; `python benchmarks/fit.py` prints an update's "
        "seconds here",
    ),
    _page(
        "Fig. 1",
        "normalised variance changes early and at the cuts of the rate",
        "results.md",
        "variance of SGD's normalised coordinates",
    ),
    _page("Fig. 3", "validation loss", "results.md", "end with a lower validation loss"),
    _page("Fig. 4", "variance in training", "results.md", "in their own trainings"),
    _page(
        "Fig. 5",
        "variance on SGD's trajectory",
        "results.md",
        "adaptive methods add less variance",
        "less mean squared error",
    ),
    _page(
        "Fig. 6",
        "adaptive levels are more concentrated near zero",
        "results.md",
        "more concentrated near zero",
    ),
    _page("Fig. 7a", "bucket size", "results.md", "from bucket size", "at all bucket sizes"),
    _page("Fig. 7b", "bits", "results.md", "at all numbers of bits"),
    _page(
        "Section 5.1",
        "AMQ is inferior at extreme bucket sizes and at 2 bits",
        "results.md",
        "AMQ is less accurate than ALQ",
    ),
    _page(
        "Section 5.1",
        "NUQSGD is nearly as good at bucket size 100",
        "results.md",
        "at bucket size 100",
    ),
    _page(
        "Section 3.1, Fig. 8",
        "descent converges in fewer than 10 steps",
        "results.md",
        "coordinate descent converges",
    ),
    _page(
        "Fig. 8",
        "different starts end at different tables",
        "results.md",
        "different starts and solvers",
    ),
    _not(
        "Fig. 9",
        "training loss of all methods",
        "the table of [results](results.md) has it; the paper claims nothing else from it",
    ),
    _page("Fig. 10", "Fig. 3 with more methods", "results.md", "end with a lower validation loss"),
    _page(
        "Fig. 11", "Fig. 5 with more methods", "results.md", "adaptive methods add less variance"
    ),
    _page("Fig. 12", "Fig. 4 with more methods", "results.md", "in their own trainings"),
    _page("Fig. 13", "32 workers", "results.md", "with 32 workers"),
    _page(
        "Fig. 14",
        "with clipping ALQ and ALQ-N are better or equal",
        "results.md",
        "clipped, ALQ and ALQ-N",
    ),
]

NUQSGD = [
    _test("Algorithm 1", "data-parallel SGD with codes", "simulate/test_simulate_ranks.py"),
    _test("Definition 1, Fig. 1", "rounding to uneven levels", "kernels/test_rounding.py"),
    _test("App. A", "Elias's recursive code", "coding/test_omega.py"),
    _test("Theorem 1", "convergence of SGD (Bubeck)", _THEORY("convergence")),
    _test(
        "Theorem 2",
        "bound on the variance; the formula is missing in our text, ALQ's Theorem 2 "
        "at ratio 2 stands for it",
        _THEORY("variance"),
    ),
    _test(
        "Theorem 3",
        "bound on the code length, derived as the formula is missing",
        _THEORY("code_length"),
        "holds, its o(1) replaced by Elias's real lengths",
    ),
    _test("Theorem 4", "convergence, smooth convex", _THEORY("convergence"), "mended"),
    _test("Theorem 5", "fewer bits in all than QSGD", _THEORY("convergence")),
    _test("Corollary 1", "convergence of data-parallel SGD", _THEORY("convergence")),
    _test("Lemma 1", "variance of rounding to any levels", _THEORY("variance")),
    _test("Lemma 2", "expected number of nonzero coordinates", _THEORY("code_length")),
    _test(
        "Lemma 3",
        "length of the codes of a vector; the formula is missing in our text",
        _THEORY("code_length"),
        "holds as derived",
    ),
    _test("Fig. 2", "its bound on the variance is below QSGD's", _THEORY("lemmas")),
    _page(
        "Fig. 3",
        "NUQSGD's and QSGDinf's training loss is below QSGD's",
        "results.md",
        "ends with a lower training loss than QSGD-4bit-8192",
    ),
    _page(
        "Fig. 4, left",
        "QSGD has the most variance on SGD's trajectory",
        "results.md",
        "QSGD-4bit-8192's variance on SGD's path",
        "have less variance than single-worker SGD",
    ),
    _page(
        "Fig. 4, right",
        "QSGD's normalised variance stays when the rate is cut",
        "results.md",
        "normalised variance stays",
    ),
    _page(
        "Fig. 5",
        "NUQSGD and QSGDinf are more accurate than QSGD",
        "results.md",
        "^QSGD-4bit-8192 is less accurate than (NUQSGD|QSGDinf)",
    ),
    _page(
        "Section 5",
        "QSGD does not reach SGD's accuracy, NUQSGD does",
        "results.md",
        "^QSGD-4bit-8192 is less accurate than SGD",
        "^NUQSGD-4bit-8192 is within .* of SGD",
    ),
    _page(
        "Section 5",
        "NUQSGD matches QSGDinf",
        "results.md",
        "^NUQSGD-4bit-8192 is within .* of QSGDinf",
    ),
    _not(
        "Fig. 6",
        "normalised variance on each method's own path",
        "the paper itself says that these curves cannot be compared",
    ),
]

QSGD = [
    _test(
        "Algorithm 1, Fig. 1",
        "parallel SGD with codes; rounding to 5 levels",
        "simulate/test_simulate_ranks.py",
    ),
    _test(
        "Definition 2.1",
        "stochastic gradients: the rounded one is unbiased",
        "kernels/test_rounding.py",
    ),
    _test(
        "Theorem 2.1",
        "convergence of SGD (Bubeck)",
        _THEORY("convergence"),
        "holds, up to twice too large",
    ),
    _test("Corollary 2.2", "convergence of parallel SGD", _THEORY("convergence"), "mended"),
    _test("Lemma 3.1", "unbiased, variance min(n/s², √n/s), sparsity", _THEORY("variance")),
    _test("Theorem 3.2", "variance and code length", _THEORY("code_length"), "mended"),
    _test(
        "Corollary 3.3",
        "2.8 n + 32 bits at s = √n",
        _THEORY("code_length"),
        "holds of its own dense code; the sparse code takes 3 n where nothing is zero",
    ),
    _test("Theorem 3.4", "convergence, smooth convex", _THEORY("convergence"), "mended"),
    _test("Theorem 3.5", "convergence, smooth", _THEORY("convergence"), "mended"),
    _test(
        "Theorem 3.6",
        "QSVRG gains 0.9 an epoch, in the stated number of bits",
        "test_qsvrg.py",
        "holds",
        "`pytest` that file; `python research/qsvrg.py --simulate`",
    ),
    _page(
        "Table 1, Fig. 3",
        "8 bits at bucket size 512 reach full accuracy",
        "results.md",
        "QSGDinf-8bit-512 is within",
    ),
    _page(
        "Table 1, Fig. 3",
        "4 bits at bucket size 512 reach full accuracy",
        "results.md",
        "QSGDinf-4bit-512 is within",
    ),
    _page(
        "Section 5",
        "4 bits at bucket size 8192 lose accuracy",
        "results.md",
        "QSGDinf-4bit-8192 is less accurate than SuperSGD",
    ),
    _page(
        "Section 5",
        "2 bits at bucket size 64 lose accuracy",
        "results.md",
        "QSGDinf-2bit-64 is less accurate than SuperSGD",
    ),
    _not("Table 1", "speed-ups of training", _TIMES),
    _not("Fig. 2", "computation and communication of an epoch", _TIMES),
    _not(
        "Section 5",
        "QSGD matches or beats 1BitSGD",
        "in the paper's full version alone, with settings that our text does not have",
    ),
]

ORQ = [
    _not("Table 1", "parameters of models and times to send them", "arithmetic, no claim"),
    _test(
        "Assumptions 1 to 3",
        "unbiased, bounded variance, smooth: of Proposition 1",
        _THEORY("lemmas"),
    ),
    _test(
        "Proposition 1",
        "of unbiased quantisers that of least error descends most",
        _THEORY("lemmas"),
    ),
    _test("Theorem 1", "condition of optimal levels, Eq. 8", "schemes/test_orq_levels.py"),
    _test("Corollary 1.1", "least and greatest coordinate are levels", _THEORY("lemmas")),
    _test("Remark 1.1", "even levels for a uniform law", "schemes/test_orq_levels.py"),
    _test(
        "Remark 1.2",
        "Eqs 11, 12",
        "schemes/test_orq_levels.py",
        "mended: Eq. 12 counts samples equal to a level twice",
    ),
    _test("Algorithm 1", "greedy levels", "schemes/test_orq_levels.py"),
    _test(
        "Eqs 14, 15",
        "BinGrad-pb",
        "schemes/test_bingrad.py",
        "mended: Eq. 14's condition is reversed",
    ),
    _test("Eqs 16, 17", "BinGrad-b", "schemes/test_bingrad.py"),
    _test("Algorithm 2", "distributed training", "simulate/test_simulate_ranks.py"),
    _page(
        "Fig. 1",
        "use of levels and shape of the gradient",
        "orq.md",
        "leave zero with QSGD-9",
        "ORQ-9 uses the levels",
        "ORQ-9 keeps the gradient's shape",
        "Linear-9 loses most",
    ),
    _page(
        "Fig. 2",
        "ORQ's error is the least at each number of levels",
        "orq.md",
        "ORQ-3's error is below",
        "ORQ-5's error is below",
        "ORQ-9's error is below",
    ),
    _page("Fig. 2", "ORQ gains more the fewer the levels", "orq.md", "ORQ gains more the fewer"),
    _page("Fig. 2", "BinGrad's errors", "orq.md", "BinGrad-b's error is below", "BinGrad's errors"),
    _page(
        "Table 2",
        "ORQ is more accurate than its counterparts",
        "orq.md",
        "ORQ-3 is more accurate than TernGrad$",
        "^ORQ-[59] is more accurate than (\\S+)$",
    ),
    _page(
        "Table 2",
        "BinGrad-b is the most accurate of two and three levels",
        "orq.md",
        "BinGrad-b is more accurate than",
    ),
    _page(
        "Table 3",
        "accuracy falls with the bucket size, ORQ's less",
        "orq.md",
        "loses accuracy from bucket size",
        "at every bucket size",
        "in the mean of the bucket",
        "loses less with larger buckets",
    ),
    _page(
        "Table 3",
        "the bucket size is no major factor in the compression",
        "orq.md",
        "no major factor",
    ),
    _page("Table 4", "clipping", "orq.md", "with c = 1.7", "clipped at c = 2.5"),
    _page("Ratios", "x20.2, x13.8, x10.1", "orq.md", "the paper's ratios"),
    _page(
        "Fig. 3, Table 5",
        "ORQ ahead of its counterparts on several workers, clipped; on MNIST for ImageNet",
        "orq.md",
        "^ORQ-. is more accurate than .* with 4 workers",
    ),
    _page(
        "Section 5.2.2",
        "ORQ-5 and ORQ-9 close to full precision",
        "orq.md",
        "full precision with 4 workers",
    ),
    _page(
        "Section 5.2.2",
        "more levels help ORQ more; the paper's 0.95 is 1.50 in its own Table 5",
        "orq.md",
        "from 3 to 9 levels ORQ gains",
    ),
    _page(
        "Section 5.2.2",
        "ORQ-3 is as good as QSGD-5 and QSGD-9",
        "orq.md",
        "^ORQ-3 is within .* of QSGD",
    ),
]

QCS = [
    _test("Algorithm 1", "quantised compressive sampling", "schemes/test_qcs_scheme.py"),
    _test(
        "Eqs 5, 6",
        "the 1-bit quantiser",
        "schemes/test_qcs_estimates.py",
        "mended: as printed its mean is 2 v",
    ),
    _test("Lemma 1", "T Tᵀ = n/k I, E TᵀT = I", "schemes/test_qcs_estimates.py"),
    _test("Remark 1", "2 n/k transforms explore almost all directions", _THEORY("descent")),
    _test(
        "Theorem 2",
        "unbiased; the error is at most γ ‖g‖²",
        "schemes/test_qcs_estimates.py",
        "mended at k = 1",
    ),
    _test("Lemma 3", "MMSE's error is at most (1 - α) ‖g‖²", "schemes/test_qcs_estimates.py"),
    _test("Eqs 14", "weighted error feedback", "test_feedback.py"),
    _test(
        "Lemma 4",
        "bounds η on the residual",
        _THEORY("feedback"),
        "holds; Eq. 15 if gradient and residual are uncorrelated",
    ),
    _test(
        "Remark 2",
        "best β; unbiased feedback has the lower bound",
        _THEORY("feedback"),
        "β: holds; the comparison does not hold under equal assumptions",
    ),
    _test("Remark 3", "an earlier bound, 4 γ (γ + 1), is larger", _THEORY("feedback")),
    _test("Lemma 5", "descent without feedback", _THEORY("descent")),
    _test("Eq. 22", "O(1/√T) for both estimators", _THEORY("descent")),
    _test("Remark 4", "bounded variance is enough", _THEORY("descent")),
    _test(
        "Lemma 6",
        "descent with feedback",
        _THEORY("descent"),
        "holds, its last term four times too large",
    ),
    _test("Eq. 23", "descent with feedback at √(1 + ε)/√T", _THEORY("descent")),
    _test(
        "Section 5",
        "feedback dwarfs the effect of compression, O(1/T) for O(1/√T)",
        _THEORY("descent"),
        "holds, exactly on a quadratic; Eq. 23 shows T^(-3/4) alone",
    ),
    _not("Fig. 1", "the network of workers", _DRAWING),
    _page(
        "Fig. 2a",
        "the range of step sizes: compression narrows it, QCS widens it again",
        "qcs.md",
        "compression narrows",
        "QCS widens",
        "it also does",
    ),
    _page(
        "Fig. 2b, c",
        "QCS is faster",
        "qcs.md",
        "QCS is faster",
        "it is with larger",
        "it is by the paper's account",
    ),
    _page(
        "Section 2",
        "QCS at 0.10 takes half the steps of QSGD at 0.05, all bits counted",
        "qcs.md",
        "QSGD at 0.05, all bits",
    ),
    _page(
        "Section 2",
        "the same by the paper's account of bits, Eq. 11",
        "qcs.md",
        "QSGD at 0.05, by the paper's account",
    ),
    _page(
        "Fig. 3", "the bound is orders of magnitude below QSGD's", "qcs.md", "orders of magnitude"
    ),
    _page("Fig. 3", "less error than Sparse SGD at every gain", "qcs.md", "below Sparse SGD's"),
    _page(
        "Fig. 4",
        "less error than QSGD, closest to its mean",
        "qcs.md",
        "QCS's error is below QSGD's",
        "keeps closest to its mean",
    ),
    _not("Fig. 5", "time to compress", _TIMES),
    _page("Figs 6, 7", "QCS reaches the baseline, SGD", "qcs.md", ", SGD: QCS-"),
    _page(
        "Fig. 8",
        "QCS reaches the baseline, Adam; a LeNet for CifarNet",
        "qcs.md",
        "LeNet, Adam: QCS-",
    ),
]

PAPERS = {
    "ALQ and AMQ (Faghri et al., 2020)": ALQ,
    "NUQSGD (Ramezani-Kebrya et al., 2019)": NUQSGD,
    "QSGD (Alistarh et al., 2017)": QSGD,
    "ORQ and BinGrad (Xu, Huo, Huang, 2020)": ORQ,
    "QCS (Abdi and Fekri, 2020)": QCS,
}
