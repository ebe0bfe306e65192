"""Chapter 01: what its exercises ask for, with hints and explanations."""

from minikv.course.exercises.manifest import Bug, Chapter, Exercise, Function

CHAPTER = Chapter(
    number="01",
    name="naive_attention",
    doc="Naive attention: the formula, the mask, heads in groups, RoPE, and what it all costs.",
    skeleton=(
        Function("minikv.course.chapters.ch01_naive_attention.answers:attend_one_query", "01.1"),
        Function("minikv.attention:causal_mask", "01.2"),
        Function("minikv.attention:naive_attention", "01.3"),
        Function(
            "minikv.course.chapters.ch01_naive_attention.answers:grouped_attention",
            Bug(
                "01.4",
                (
                    ("(k.shape[1], -1)", "(-1, k.shape[1])"),
                    ("-0.5  # (T, K, G, D)", "-0.5  # (T, G, K, D)"),
                    ('"tkgd,lkd->kgtl"', '"tgkd,lkd->kgtl"'),
                    (
                        '"kgtl,lkd->tkgd", weights, v)  # (T, K, G, D)',
                        '"kgtl,lkd->tgkd", weights, v)  # (T, G, K, D)',
                    ),
                    ("# (T, K * G, D)", "# (T, G * K, D)"),
                ),
            ),
        ),
        Function("minikv.model:rotate", "01.5"),
        Function("minikv.course.chapters.ch01_naive_attention.answers:work_of_generation", "01.6"),
    ),
    exercises=(
        Exercise(
            id="01.1",
            title="One query, one head",
            minutes=10,
            difficulty=1,
            kind="build",
            matters="Every engine in this course computes these four lines, in one disguise or "
            "another.",
            hints=(
                """Take scores 1000 and 1001. Which step fails? What do you know about the weights
                without computing exp(1000)?""",
                """Four lists, one after the other: products, scores, weights, result. The result
                has one number for each place of a value, not one for each key. And e^(s - m) is
                e^s / e^m, so subtracting the same m from every score changes no weight.""",
                """
                scores = for each key: (sum of query[i] * key[i]) / square root of D
                m = the largest score
                weights = for each score: exp(score - m)
                total = sum of the weights
                result = for each place j of a value:
                    (sum over the keys of weight * value[j]) / total
                """,
            ),
            works="""
            A score says how well a key answers the query. exp makes every score positive, and the
            division by the sum makes shares of them. So the result is a weighted mean: it lies
            between the values and never outside.

            If you subtract the same m from every score, it cancels: e^(s - m) = e^s / e^m, and the
            factor appears in numerator and denominator. With m the largest score, the largest
            exponent is 0 and exp cannot overflow. Without m, float64 overflows at scores of about
            709 and float16 at about 11.

            Why divide by the root of D? If the entries of query and key are independent, of mean 0
            and variance 1, their dot product has variance D (Vaswani et al., 2017, section 3.2.1).
            Without the division, the scores of a wide head are so far apart that softmax picks one
            key, and its gradient nearly vanishes.

            Chapter 04 does the same when the scores come block by block: it keeps the largest score
            so far and the sum so far, and rescales the sum when a larger score comes (Milakov and
            Gimelshein, 2018).
            """,
        ),
        Exercise(
            id="01.2",
            title="The causal mask",
            minutes=10,
            difficulty=2,
            kind="build",
            matters="If a query sees a later token, the model cheats in training; if the rows are "
            "misplaced, it ignores its prefix.",
            hints=(
                """With 2 queries and 5 keys, at which position does query 0 stand? And where does
                the last query always stand?""",
                """Make two ranges: the positions of the queries as a column, and the positions of
                the keys as a row. One comparison of the two gives the whole mask. Ask two questions
                about each pair: is the key too late? With a window: is it too old?""",
                """
                query = the last num_queries of the positions 0 … num_keys - 1, as a column
                key = the positions 0 … num_keys - 1, as a row
                mask = key is at or before query
                if there is a window:
                    mask = mask and key is after (query - window)
                return mask
                """,
            ),
            works="""
            Comparing a column with a row compares every pair, so the mask needs no loop. Without a
            window, its last row is all True: the newest token may look at everything. That is why a
            decode step, which has one query, needs no mask at all.

            Where the queries stand decides the shape. In prefill they are all positions; with a
            cache they are the last ones. Two conventions are in use, and mixing them up hides most
            of the prefix: `is_causal=True` of torch's scaled_dot_product_attention counts from the
            upper left corner; FlashAttention did so until version 2.1 and has counted from the
            lower right since (2023).

            The window is that of Mistral 7B (Jiang et al., 2023): the last `window` positions,
            including the query's own. Information still travels further, one window per layer.

            No fast engine builds this tensor for a long prompt. It would take T × L bytes, and a
            kernel can compare the two positions as it goes.
            """,
        ),
        Exercise(
            id="01.3",
            title="Attention with many heads",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="This function is the oracle: every later chapter is right if it equals this "
            "one.",
            hints=(
                """Which of the three inputs have too few heads, and which shape should they have
                before the first product? Write the shape of every tensor beside it.""",
                """Five steps: give every query head its own copy of a KV head, neighbours the same
                one; everything to float32; scores for every head (H, T, L), scaled; mask, then
                softmax over the keys; weighted sum, back to (T, H, D) and to q's dtype.
                torch.einsum lets you write the dimensions as letters.""",
                """
                group = query heads / KV heads
                k, v = each KV head `group` times in a row (0, 0, 1, 1), in float32    # (L, H, D)
                scores = einsum thd, lhd -> htl of q in float32 and k, times 1 / sqrt(D)
                where causal_mask(T, L, window) is False: scores = -inf
                weights = softmax of scores over the keys, the last dimension
                return einsum htl, lhd -> thd of weights and v, in q's dtype
                """,
            ),
            works="""
            Heads are independent: each has its own channels of q, k and v, and its own weights.
            That lets one look at the token before while another looks for an earlier copy of it.

            KV heads are shared to save memory. Multi-query attention keeps one KV head for all
            query heads (Shazeer, 2019), grouped-query attention one for each group (Ainslie et al.,
            2023). Llama 2 70B has 64 query heads on 8 KV heads, so it keeps an eighth (Touvron et
            al., 2023). Which query head belongs to which KV head is a convention of the checkpoint:
            neighbours share, as in `repeat_interleave`.

            The arithmetic is in float32, because a long sum in bfloat16, which has 8 significant
            bits, loses its small terms. Kernels do the same: inputs in half precision, sums in
            float32.

            Two things here are wasteful on purpose. The repeated keys and values are written to
            memory and read again, and so are the scores, H × T × L of them. FlashAttention (Dao et
            al., 2022) writes neither; chapters 04 and 08 get there.
            """,
        ),
        Exercise(
            id="01.4",
            title="Right with one KV head, wrong with two",
            minutes=20,
            difficulty=3,
            kind="debug",
            matters="Shapes fit, nothing fails, small tests pass, and the text is nonsense: the "
            "usual way in which attention breaks.",
            hints=(
                """The notebook's table says for which head counts the function is right. In every
                right row one of two numbers is 1. Which two?""",
                """Give it one token and one key, so that every weight is 1. Then each query head
                returns the value of the KV head that it reads, and you can see which one that is.
                With 2 KV heads, which one should query head 1 of 4 read?""",
                """
                num_heads = K * G query heads in one row, the G heads of KV head 0 first:
                    head h  ->  KV head h // G, place h % G in the group
                so splitting that row in two gives K as the outer and G as the inner dimension
                joining them at the end: the same two dimensions, in the same order
                read every line and its letters: where is it (G, K)?
                """,
            ),
            works="""
            unflatten cuts one dimension into an outer and an inner one. Heads 0, 1, 2, 3 as (K, G)
            are [[0, 1], [2, 3]]: heads 0 and 1 read KV head 0. Read as (G, K), the same table says
            that heads 0 and 2 read KV head 0, as if `repeat` had been used in place of
            `repeat_interleave`. With K = 1 or G = 1 the two are the same, so tests of multi-head
            and of multi-query attention pass. And with K = G, as in tinypy, even a fix of half the
            lines runs without an error, because every shape still fits.

            It has happened. Apple's axlearn corrected the order in pull request 842 (November
            2024), whose description draws both; ONNX's definition of the Attention operator tiled
            the heads too, as its pull request 7274 (September 2025) says.

            Apart from the bug, this is the better function. It never copies keys or values: the G
            query heads of a group stand side by side and meet the same KV head. Kernels do this to
            fetch a key once per group; chapter 08 packs the group into one product.
            """,
        ),
        Exercise(
            id="01.5",
            title="Turn by position",
            minutes=15,
            difficulty=3,
            kind="build",
            matters="Without it, a layer of attention sees a set, not a text; with a wrong sign, "
            "distance counts backwards.",
            hints=(
                """Take D = 2: one pair (a, b) and an angle. Write down the pair rotated by the
                angle. Which of the four products has the minus?""",
                """Both channels need their own value times cos, plus their partner's value times
                sin. The minus is in `sin` already. So only one thing is left to make: x with every
                channel swapped with its partner. Channels i and i + D / 2 are partners, so the two
                halves change places.""",
                """
                first, second = the two halves of x's last dimension
                swapped = second and then first, joined along the last dimension
                return x * cos + swapped * sin
                (cos and sin are (T, 1, D): they fit every head by themselves)
                """,
            ),
            works="""
            If q is rotated by the angle of its position m, and k by that of n, the product depends
            on m - n alone. Write a pair as a complex number: q e^(iam) times the conjugate of
            k e^(ian) contains e^(ia(m - n)) (Su et al., 2021). Each pair has its own speed a, from
            one radian per token down to about a ten-thousandth: some pairs tell neighbours apart,
            others chapters. Only q and k are rotated; v is content, and needs no position.

            A key's rotation depends only on its own position, so a rotated key can be cached:
            minikv, vLLM and llama.cpp cache keys after rotation. And because rotations add up,
            llama.cpp can move a cached key to another position by rotating it once more (its
            K-shift), without recomputing it.

            Which channels form a pair is a convention of the checkpoint. The paper and Meta's own
            Llama code pair neighbours; transformers pairs halves, and its conversion of Meta's
            weights permutes the rows of W_q and W_k to match. Mixing the two raises no error:
            llama2.c first took weights from transformers without undoing that, and its text fell
            apart after some 20 tokens (karpathy/llama2.c, comments on pull request 286, 2023).
            """,
        ),
        Exercise(
            id="01.6",
            title="How much is computed twice",
            minutes=10,
            difficulty=2,
            kind="predict",
            matters="This is the bill for naive generation, and the most that a cache can save.",
            hints=(
                """How many rows does the first pass have? And the last one? Which token is never
                fed to the model at all?""",
                """Four sums over the passes, whose lengths run from P to P + N - 1. A row is new in
                the first pass that contains it. A pass of n rows computes n × n scores; the mask
                comes later. New scores: row number i, counted from 1, needs i of them.""",
                """
                lengths = P, P + 1, …, P + N - 1
                rows       = sum of the lengths
                new rows   = the longest length
                scores     = sum of the squares of the lengths
                new scores = 1 + 2 + … + the longest length
                """,
            ),
            works="""
            Every pass has one row more than the pass before, so N new tokens after a prompt of P
            take N P + N (N - 1) / 2 rows. The second term grows with the square of the answer's
            length, and the scores with its cube. After the first pass, one row per pass is new.

            None of the old rows has changed. A row looks only at the rows before it, and they are
            the same as in the last pass. So what later rows need from it can be kept: its key and
            its value, in every layer. Its query need not be kept, because only its own row uses it,
            and the same holds for everything else. That is why it is called a KV cache, not a QKV
            cache; chapter 02 builds it.

            Even with a cache, the scores that are needed grow with the square of the length. And
            the first pass has no earlier pass to reuse: a cache does nothing for prefill, and
            nothing for an answer of one token.
            """,
        ),
    ),
)
