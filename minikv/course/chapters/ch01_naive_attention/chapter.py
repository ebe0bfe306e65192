"""Chapter 01: what its exercises ask for, with hints and explanations."""

from minikv.course.harness.manifest import Bug, Chapter, Exercise, Function

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
            matters="Every engine in this course computes these four lines, however well it hides "
            "them.",
            hints=(
                """Take scores 1000 and 1001. Which step fails? What do you know about the weights
                without computing exp(1000)?""",
                """Four lists, one after the other: products, scores, weights, result. The result
                has one number for each place of a value, not one for each key. And e^(s - m) is
                e^s / e^m, so taking the same m off every score changes no weight.""",
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

            The same m taken off every score cancels, because e^(s - m) = e^s / e^m stands above and
            below the line. With m the largest score, the largest exponent is 0 and exp cannot
            overflow; without it, float64 ends at scores of about 709 and float16 at about 11.

            Why divide by the root of D? If query and key are independent numbers of mean 0 and
            variance 1, their product over D places has variance D (Vaswani et al., 2017, section
            3.2.1). Undivided, the scores of a wide head are so far apart that softmax picks one key
            and its gradient all but vanishes.

            Chapter 04 does the same when the scores come block by block: it keeps the largest score
            and the sum as they are so far, and corrects both (Milakov and Gimelshein, 2018).
            """,
        ),
        Exercise(
            id="01.2",
            title="The causal mask",
            minutes=10,
            difficulty=2,
            kind="build",
            matters="One token seen too early and the model cheats in training; one row off and a "
            "cached prefix is ignored.",
            hints=(
                """At which position does query 0 stand if there are 2 queries and 5 keys? And the
                last query, always?""",
                """Make two ranges: the positions of the queries, standing upright as a column, and
                the positions of the keys, lying as a row. Comparing them gives the whole square at
                once. Two questions for a pair: is the key too late? With a window: is it too
                old?""",
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
            A comparison of a column with a row compares every pair, so the mask needs no loop. Its
            last row is always all True without a window: the newest token may look at everything.
            That is why a decode step, one query, needs no mask at all.

            Square or rectangle is a question of where the queries stand. In prefill they are all
            positions; with a cache they are the last ones. Both conventions are in use, and mixing
            them up ignores most of the prefix: `is_causal=True` of torch's
            scaled_dot_product_attention counts from the upper left corner, FlashAttention did so
            until version 2.1 and counts from the lower right since (2023).

            The window is that of Mistral 7B (Jiang et al., 2023): the last `window` positions, the
            query's own included. Information still travels further than that, one window a layer.

            No engine that is fast builds this tensor for a long prompt: T × L bytes are a lot, and
            a kernel can compare two positions on the way.
            """,
        ),
        Exercise(
            id="01.3",
            title="Attention with many heads",
            minutes=25,
            difficulty=3,
            kind="build",
            matters="This function is the oracle: every later chapter is right when it equals this "
            "one.",
            hints=(
                """Which of the three inputs have too few heads, and how would you like them to
                look before the first product? Write the shape of every tensor beside it.""",
                """Five steps: give every query head its own copy of a KV head, neighbours the same
                one; everything to float32; scores for every head (H, T, L), scaled; mask, then
                softmax over the keys; weighted sum, back to (T, H, D) and to q's dtype.
                torch.einsum takes the letters as you think them.""",
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

            Sharing KV heads is about memory. Multi-query attention keeps one KV head for all
            (Shazeer, 2019), grouped-query attention one for each group (Ainslie et al., 2023):
            Llama 2 70B has 64 query heads on 8 KV heads and so keeps an eighth (Touvron et al.,
            2023). Which query head belongs to which KV head is a convention of the checkpoint.
            Neighbours share, as in `repeat_interleave`.

            float32 inside, because a sum of many products in bfloat16, which has 8 significant
            bits, loses what is small. Kernels do the same: inputs in half precision, sums in
            float32.

            Two things here are wasteful on purpose. The repeated K and V are written to memory and
            read again, and so are the scores, H × T × L of them. FlashAttention (Dao et al., 2022)
            writes neither; chapters 04 and 08 get there.
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
                returns the value of the KV head that it reads, and you can see which that is.
                Which should query head 1 of 4 read, with 2 KV heads?""",
                """
                num_heads = K * G query heads in one row, the G heads of KV head 0 first:
                    head h  ->  KV head h // G, place h % G in the group
                so splitting that row into two dimensions has K outside and G inside: (K, G)
                joining them at the end: the same two dimensions, the same order
                read every line and its letters: where is it (G, K)?
                """,
            ),
            works="""
            unflatten cuts one dimension into an outer and an inner one. Heads 0, 1, 2, 3 as (K, G)
            are [[0, 1], [2, 3]]: heads 0 and 1 read KV head 0. Read as (G, K), the same table says
            that heads 0 and 2 read KV head 0, which is what `repeat` does in place of
            `repeat_interleave`. With K = 1 or G = 1 both are the same, so tests on multi-head and
            on multi-query attention pass. And with K = G, as in tinypy, even a mend of half the
            lines runs without an error, because no shape can tell.

            It has happened: Apple's axlearn put the order back in pull request 842 (November 2024),
            whose description draws both; ONNX's definition of the Attention operator tiled the
            heads too, as its pull request 7274 (September 2025) says.

            The function itself is the better one of the two. It never copies K and V: the G query
            heads of a group stand beside each other and meet the same KV head. A kernel does this,
            so that a key is fetched once for the group; chapter 08 packs them into one product.
            """,
        ),
        Exercise(
            id="01.5",
            title="Turn by position",
            minutes=15,
            difficulty=3,
            kind="build",
            matters="Without it a layer of attention sees a set, not a text; with a sign wrong, "
            "distance counts backwards.",
            hints=(
                """Take D = 2: one pair (a, b) and an angle. Write down its turn by the angle. Which
                of the four products has the minus?""",
                """Both channels need their own value times cos, plus their partner's value times
                sin. The minus is in `sin` already. So only one thing is left to make: x with every
                channel and its partner exchanged. Channel i and i + D / 2 are partners, so whole
                halves change places.""",
                """
                first, second = the two halves of x's last dimension
                swapped = second and then first, joined along the last dimension
                return x * cos + swapped * sin
                (cos and sin are (T, 1, D): they fit every head by themselves)
                """,
            ),
            works="""
            Turning q by the angle of its position m and k by that of n leaves a product that
            depends on m - n alone: for a pair as a complex number, q e^(iam) times the conjugate of
            k e^(ian) holds e^(ia(m - n)) (Su et al., 2021). Each pair has its own speed a, from one
            radian a token down to about a ten-thousandth: some pairs tell neighbours apart, others
            chapters. Only q and k are turned; v is what is fetched, and stands nowhere.

            Because the key's turn is fixed by its own position, a turned key can be kept: minikv,
            vLLM and llama.cpp cache keys after the turn. And because turns add up, llama.cpp can
            move a cached key to another position by turning it once more (its K-shift), without
            computing it again.

            Which channels are a pair is a convention of the checkpoint. The paper and Meta's own
            Llama code pair neighbours; transformers pairs halves, and its conversion of Meta's
            weights permutes the rows of W_q and W_k to make up for it. Mixed up, nothing fails:
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
            matters="This is the bill of naive generation, and the most that a cache can save.",
            hints=(
                """How many rows has the first pass? And the last one? Which token is never fed to
                the model at all?""",
                """Four sums over the passes, whose lengths run from P to P + N - 1. A row is new in
                the first pass that holds it. A pass of n rows computes n × n scores, whatever the
                mask does with them later. New scores: row number i, counted from 1, needs i of
                them.""",
                """
                lengths = P, P + 1, …, P + N - 1
                rows       = sum of the lengths
                new rows   = the longest length
                scores     = sum of the squares of the lengths
                new scores = 1 + 2 + … + the longest length
                """,
            ),
            works="""
            Every pass takes one row more than the pass before, so N new tokens after a prompt of P
            take N P + N (N - 1) / 2 rows: the second term grows with the square of the answer, and
            the squares of the lengths add up to a cube. What is new is a single row a pass.

            None of the old rows has changed. A row looks only at those before it, and they are the
            same as in the last pass. So what a row leaves for later ones can be kept: its key and
            its value, in every layer. Queries need not be kept, because a query is used by its own
            row alone, and so it is with everything else. That is why it is called a KV cache, not a
            QKV cache, and chapter 02 builds it.

            The scores that are needed still grow with the square of the length, also with a cache.
            And the first pass has no older one to profit from: a cache does nothing for prefill,
            and nothing for an answer of one token.
            """,
        ),
    ),
)
