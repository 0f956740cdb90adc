"""Defects planted in kernels, and the checks that must notice each: what keeps the checks checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLAIN, SHUFFLED, ADDRESS, THREAD = "plain", "shuffled", "address,undefined", "thread"
"""Threads in index order; in an order by a seed; two sanitizer builds."""


@dataclass(frozen=True)
class Defect:
    """A change of a kernel file.

    Attributes:
        name: what is wrong.
        file: in the folder of kernels.
        old: text to replace.
        new: by this.
        noticed_by: checks that must fail.
        occurrence: which one of `old`, from 0.
    """

    name: str
    file: str
    old: str
    new: str
    noticed_by: tuple[str, ...]
    occurrence: int = 0

    def plant(self, folder: Path) -> None:
        """Damage the file in a copy of the folder.

        Raises:
            ValueError: the kernel no longer has this text.
        """
        path = folder / self.file
        parts = path.read_text().split(self.old)
        if len(parts) < self.occurrence + 2:
            raise ValueError(f"{self.name}: {self.file} has no occurrence {self.occurrence} of '{self.old}'")
        before, after = parts[: self.occurrence + 1], parts[self.occurrence + 1 :]
        path.write_text(self.old.join(before) + self.new + self.old.join(after))


TENSOR, FMA, SHARED, MERGE = "paged_attention.cu", "paged_attention_fma.cu", "attention.cuh", "attention_merge.cu"

ATTENTION = (
    Defect("no barrier after copies have landed", TENSOR, "sync_block<WARPS>();", "", (THREAD,), 0),
    Defect("no barrier before a stage is reused", TENSOR, "sync_block<WARPS>();", "", (THREAD,), 1),
    Defect(
        "barrier of the warp for the whole block", TENSOR, "if constexpr (WARPS > 1)", "if constexpr (false)", (THREAD,)
    ),
    Defect(
        "barrier in one warp", TENSOR, "sync_block<WARPS>();", "if (warp == 0) sync_block<WARPS>();", (PLAIN, SHUFFLED)
    ),
    Defect(
        "barrier left out by idle warps",
        TENSOR,
        "commit_copies();\n            wait",
        "if (own.end == 0) break; commit_copies(); wait",
        (PLAIN,),
    ),
    Defect("wait one group short", TENSOR, "wait_for_copies<1>", "wait_for_copies<2>", (PLAIN, SHUFFLED)),
    Defect("copies never waited for", TENSOR, "wait_for_copies<1>();", "", (PLAIN, SHUFFLED)),
    Defect(
        "halves of ldmatrix swapped",
        TENSOR,
        "lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]",
        "lane / 8 % 2 * 8 + lane % 8][k * 16 + lane / 16 * 8]",
        (PLAIN,),
    ),
    Defect(
        "no rescaling of what was summed", TENSOR, "out[j][i] = __fmul_rn(out[j][i], factor[i >> 1]);", ";", (PLAIN,)
    ),
    Defect("no running maximum", TENSOR, "max[h] = peak[h];", "", (PLAIN,)),
    Defect(
        "shuffle in a divergent branch",
        TENSOR,
        "sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);",
        "if (num_seen[h]) sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);",
        (PLAIN, SHUFFLED),
    ),
    Defect("row sum over half of its lanes", TENSOR, "sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);", "", (PLAIN,)),
    Defect("total not kept", TENSOR, "total[j][i][lane] = folded(j, i);", "folded(j, i);", (PLAIN,)),
    Defect("warp takes its neighbour's total", TENSOR, "shared.total[warp]", "shared.total[warp / 2]", (PLAIN, THREAD)),
    Defect("scratch one row short", TENSOR, "RESIDENT ? 1 : WARPS * 16]", "RESIDENT ? 1 : WARPS * 16 - 1]", (PLAIN,)),
    Defect(
        "partial rows of the tile's first warp", TENSOR, "item.partial + tile_row + r", "item.partial + r", (PLAIN,)
    ),
    Defect("writes rows past the end", TENSOR, "if (num_seen[h])", "if (true)", (ADDRESS,)),
    Defect("causal mask off by one", TENSOR, "position + 1 - first_seen[h]", "position - first_seen[h]", (PLAIN,)),
    Defect("window one too wide", TENSOR, "position - window + 1", "position - window", (PLAIN,)),
    Defect("block of the next tokens", SHARED, "blocks + first / BLOCK", "blocks + first / BLOCK + 1", (ADDRESS,)),
    Defect("tokens past the end are copied", SHARED, "first + t < range.end;", "true;", (PLAIN,)),
    Defect("misaligned copy", SHARED, "v_cache + from + i", "v_cache + from + 1 + i", (PLAIN, SHUFFLED)),
    Defect("fold ignores the maximum", SHARED, "exp2_fast(max - joint)", "1.f", (PLAIN,)),
    Defect("cap at half", SHARED, "__fdividef(2.f, soft_cap)", "__fdividef(1.f, soft_cap)", (PLAIN,)),
    Defect("one split too few", MERGE, "s < item.num_splits", "s < item.num_splits - 1", (PLAIN,)),
    Defect("stride of a split ignored", MERGE, "s * item.stride", "s", (PLAIN,)),
    Defect("partial rows read past the end", MERGE, "s < item.num_splits", "s < item.num_splits + 1", (PLAIN, ADDRESS)),
    Defect("weights read before they are written", FMA, "__syncwarp();", "", (THREAD,), 0),
    Defect("no barrier after copies have landed", FMA, "__syncwarp();", "", (THREAD,), 1),
    Defect("no barrier before a stage is reused", FMA, "__syncwarp();", "", (THREAD,), 2),
    Defect("columns past the head", FMA, "j * 32 + threadIdx.x < D", "true", (ADDRESS,)),
    Defect("sum is not rescaled", FMA, "__fmaf_rn(sum[r], factor, weight)", "sum[r] + weight", (PLAIN,)),
)

SAMPLE, PROCESS, ROTARY, NORM, REDUCE = "sample.cu", "process.cu", "rotary.cu", "rms_norm.cu", "reduce.cuh"

ROW = (
    Defect(
        "no barrier before partial results are read", REDUCE, "    __syncthreads();\n    value", "    value", (THREAD,)
    ),
    Defect("partial results overwritten while read", REDUCE, "__syncthreads();\n    return", "return", (THREAD,)),
    Defect("a warp left out of a sum", REDUCE, "warp = 1; warp < warps", "warp = 2; warp < warps", (PLAIN,)),
    Defect("half a warp left out of a sum", REDUCE, "distance = 16", "distance = 8", (PLAIN,)),
    Defect("row one element too long", NORM, "i < width", "i <= width", (ADDRESS,)),
    Defect("the residual is not kept", NORM, "stream[row + i] = x;", "", (PLAIN,)),
    Defect("padding is stored", ROTARY, "slot < 0", "false", (PLAIN, ADDRESS)),
    Defect("values rotated like keys", ROTARY, "head < num_heads + num_kv_heads) {", "true) {", (PLAIN,)),
    Defect("pairs turn the other way", ROTARY, "first * c - b * s", "first * c + b * s", (PLAIN,)),
    Defect("bins not cleared", SAMPLE, "scratch.bins[i / kBins][i % kBins] = 0;", "", (PLAIN,)),
    Defect("bins counted while they are cleared", SAMPLE, "= 0;\n        __syncthreads();", "= 0;", (THREAD,)),
    Defect(
        "bin chosen while they are counted",
        SAMPLE,
        "__syncthreads();\n        if (threadIdx.x < 32)",
        "if (threadIdx.x < 32)",
        (THREAD,),
    ),
    Defect("bin read while it is chosen", SAMPLE, "__syncthreads();\n        prefix", "prefix", (THREAD,)),
    Defect(
        "bins added without atomics",
        SAMPLE,
        "atomicAdd(&scratch.bins[w][bin], part)",
        "scratch.bins[w][bin] += part",
        (THREAD,),
    ),
    Defect("middle word of a mass dropped", SAMPLE, "if (part) atomicAdd", "if (part && w != 1) atomicAdd", (PLAIN,)),
    Defect(
        "least bin missed",
        SAMPLE,
        "static_cast<double>(before) >= target) break;",
        "static_cast<double>(before) > target) break;",
        (PLAIN,),
    ),
    Defect("range ignored in the draw", SAMPLE, "= x >= range.least && ", "= ", (PLAIN,)),
    Defect("target overwritten while it is read", SAMPLE, "__syncwarp();", "", (THREAD,)),
    Defect(
        "NaN passes",
        "row.cuh",
        "bad |= !(row(id) < -negative_infinity())",
        "bad |= row(id) >= -negative_infinity()",
        (PLAIN,),
    ),
    Defect(
        "highest id of equals",
        "order.cuh",
        "(0xffffffffu - static_cast<unsigned>(id))",
        "static_cast<unsigned>(id)",
        (PLAIN,),
    ),
    Defect("the next most probable repeats", "row.cuh", "key < bound", "key <= bound", (PLAIN,)),
    Defect("a rejected draft is drawn again", SAMPLE, " && id != scratch.draft", "", (PLAIN,)),
    Defect("a draft's share of nothing", SAMPLE, "static_cast<double>(total)", "1.0", (PLAIN,)),
    Defect("draft past the vocabulary", SAMPLE, "&& draft < vocab ?", "?", (ADDRESS,)),
    Defect("padding is drawn", SAMPLE, "position[i] < 0", "false", (PLAIN,)),
    Defect("padding is processed", PROCESS, "if (i < 0) return;", "", (ADDRESS,)),
    Defect("ids past the vocabulary", SAMPLE, "id < row.vocab ? row(id)", "true ? row(id)", (ADDRESS,)),
    Defect("words of Philox in another order", "philox.cuh", "counter[1] = low1;", "counter[1] = low0;", (PLAIN,)),
    Defect("mask read bit by bit from the top", PROCESS, ">> id % 32", ">> (31 - id % 32)", (PLAIN,)),
    Defect(
        "penalties before masks have landed",
        PROCESS,
        "    __syncthreads();\n    for_each_entry({history",
        "    for_each_entry({history",
        (THREAD,),
    ),
    Defect("prompt ids pay for presence", PROCESS, "if (count > 0) y -= presence;", "y -= presence;", (PLAIN,)),
)

ACCEPTED = "accept.cu"

ACCEPTANCE = (
    Defect("the last row has a draft", ACCEPTED, "i >= end - 1", "i >= end", (PLAIN, ADDRESS)),
    Defect("draft of the row before", ACCEPTED, "!= input_ids[i + 1]", "!= input_ids[i]", (PLAIN,)),
    Defect("failed rows come out", ACCEPTED, "!(failing >> last & 1)", "1", (PLAIN,)),
    Defect("a failure does not end the run", ACCEPTED, "|| fails ||", "||", (PLAIN,)),
    Defect("only the first 32 rows", ACCEPTED, "if (!stopped) continue;", "if (!stopped) return 32;", (PLAIN,)),
    Defect("scan stops short", ACCEPTED, "distance < 32", "distance < 16", (PLAIN,)),
    Defect("every round starts at 0", ACCEPTED, "before +=", "before =", (PLAIN,)),
    Defect("counts read before they are written", ACCEPTED, "__syncthreads();", "", (THREAD,), 0),
    Defect("counts written while they are read", ACCEPTED, "__syncthreads();", "", (THREAD,), 1),
    Defect("offsets of warps without a sequence", ACCEPTED, "lane == 0 && b < sequences", "lane == 0", (ADDRESS,)),
    Defect("no failure without rows", ACCEPTED, "first < end && failed", "failed", (PLAIN, ADDRESS)),
    Defect("the first token is kept", ACCEPTED, "first + count - 1", "first", (PLAIN,)),
    Defect("kept in the order of the step", ACCEPTED, "batch_rows[b]", "b", (PLAIN,), 1),
    Defect("rows without a token keep one", ACCEPTED, "last_tokens && count", "last_tokens", (PLAIN,)),
)

REJECTED = "rejection.cu"

REJECTION = (
    Defect("accepted whatever it was drawn from", REJECTED, " * row.proposed(row.draft)", "", (PLAIN,)),
    Defect("residual without the proposal", REJECTED, "row.p[id] - row.proposed(id)", "row.p[id]", (PLAIN,)),
    Defect("one purpose for both", REJECTED, "position, kAcceptance)", "position, kResidual)", (PLAIN,)),
    Defect("ids past the vocabulary", REJECTED, "id < vocab ? weight(id) : 0.0f", "weight(id)", (ADDRESS,)),
    Defect(
        "draft past the vocabulary",
        REJECTED,
        "draft_ids[row] >= 0 && draft_ids[row] < vocab",
        "draft_ids[row] >= 0",
        (ADDRESS,),
    ),
    Defect("negative probabilities pass", REJECTED, "row.p[id] >= 0.0f && ", "", (PLAIN,)),
)

BLOCK = (
    Defect(
        "ratios above 1", REJECTED, "reached < bound ? reached / bound : reached > 0.0", "reached / bound", (PLAIN,)
    ),
    Defect("drafts behind 32 left out", REJECTED, "start += 32", "start += 1 << 20", (PLAIN,), 0),
    Defect("no run behind 32 rows", REJECTED, "start += 32", "start += 1 << 20", (PLAIN,), 1),
    Defect("number of the row before", REJECTED, "i - first - 1)", "i - first)", (PLAIN,)),
    Defect("number of a row", REJECTED, "kBlockAcceptance, i", "kAcceptance, i", (PLAIN,)),
    Defect("all drafts weighed alike", REJECTED, "is_last ? joint : mass", "mass", (PLAIN,)),
    Defect("residual of one draft", REJECTED, "(joint * row.p[id] - row", "(row.p[id] - row", (PLAIN,)),
    Defect("mass of one thread", REJECTED, "mass = block_reduce(mass, partial, Sum());", "", (PLAIN,)),
    Defect("row of the next sequence", REJECTED, "if (i >= offsets[blockIdx.y + 1]) return;", "", (ADDRESS,)),
    Defect("a failed row is passed", REJECTED, "|| !can_draw[i] ||", "||", (PLAIN,)),
    Defect("a run behind the last draft", REJECTED, "stands[i]) & looked_at", "stands[i])", (PLAIN,)),
    Defect("the shortest run wins", REJECTED, "31 - __clz(standing)", "__ffs(standing) - 1", (PLAIN,)),
    Defect(
        "rows behind the run come out", REJECTED, "i > last || (i == last && !draws)", "i == last && !draws", (PLAIN,)
    ),
)

NGRAM_FILE = "ngram.cu"

NGRAM = (
    Defect("a gap takes tokens", NGRAM_FILE, "i < start ? kUnseen : ", "", (PLAIN, ADDRESS)),
    Defect("tokens outside the vocabulary", NGRAM_FILE, "token >= 0 && token < vocab", "true", (PLAIN,)),
    Defect("known tokens change", NGRAM_FILE, "i = known + threadIdx.x", "i = start + threadIdx.x", (PLAIN,)),
    Defect("length written while it is read", NGRAM_FILE, "__syncthreads();", "", (THREAD,)),
    Defect("a length shrinks", NGRAM_FILE, " && end > known", "", (PLAIN,)),
    Defect("the last place is left out", NGRAM_FILE, "last = num_tokens - 1", "last = num_tokens - 2", (PLAIN,)),
    Defect("only one tile", NGRAM_FILE, "last >= kShortest; last", "last == num_tokens - 1; last", (PLAIN,)),
    Defect("ends with any match", NGRAM_FILE, "static_cast<int>(best >> 32) == suffix.length", "best != 0", (PLAIN,)),
    Defect("the longest match does not win", NGRAM_FILE, "static_cast<Key>(length) << 32", "Key(2) << 32", (PLAIN,)),
    Defect("match across the start of a row", NGRAM_FILE, "i < end && ", "", (ADDRESS,)),
    Defect("drafts past the end", NGRAM_FILE, "i % (num_tokens - end)", "i", (PLAIN,)),
    Defect("drafts behind a gap", NGRAM_FILE, "token == kUnseen);", "i >= limit);", (PLAIN,)),
    Defect(
        "confidence without drafts", NGRAM_FILE, "count ? static_cast<int>(match >> 32) : 0", "match >> 32", (PLAIN,)
    ),
)
