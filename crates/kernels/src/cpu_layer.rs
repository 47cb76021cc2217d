//! The steps of a layer on the CPU, several kernels each.

use std::cell::Cell;
use std::ops::Range;

use crate::cpu::Cpu;
use crate::device::{GatedMlp, LayerTail, Mlp, Norm, QkNorms};
use crate::disjoint::DisjointMut;
use crate::linear::{Input, Linear, Output};
use crate::ops::{RmsNorm, Round};
use crate::prefetch;
use crate::scratch::{self, AlignedVec};
use crate::simd::{Elem, PANEL};

/// Rows that a thread takes through several steps: their intermediate results stay in its caches.
pub(crate) const BLOCK_ROWS: usize = 512;
/// Bytes of the widest of these results, about: blocks of a wide network have fewer rows, down to [`MIN_ROWS_PER_THREAD`], since each thread
/// has one of its own.
const BLOCK_BYTES: usize = 6 << 20;
/// With fewer rows for each thread, the threads share the work of each step.
const MIN_ROWS_PER_THREAD: usize = 128;
/// Rows at a time when threads share the work of each step.
const SHARED_ROWS: usize = 1024;
/// Most elements that are asked for as a whole before their norm: other threads have written half of them, and lines that come from another
/// core one by one would take longer than the norm.
const FEW: usize = 4 << 10;

thread_local! {
    /// Rows after their norm.
    static NORMED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Rows of keys and values, and of queries that do not lie apart.
    static WIDE: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// A residual branch before its post-norm, or one row's keys after their norm.
    static BRANCH: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

impl Cpu {
    /// [`Device::attn_output_and_mlp`] on slices.
    pub(crate) fn finish_layer(
        &self,
        (attn_out, first): (&[f32], usize),
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut [f32],
    ) {
        let output = tail.output.storage::<Linear>();
        let (hidden, attn_width) = (output.outputs(), output.inputs());
        assert!(x.len().is_multiple_of(hidden), "x is rows of O's outputs");
        let attn_out = &attn_out[first * attn_width..(first + rows.len()) * attn_width];
        let chosen = &mut x[rows.start * hidden..rows.end * hidden];
        let x = DisjointMut::new(chosen);
        let widest = match tail.mlp {
            Mlp::Dense(mlp) => mlp.gate_up.storage::<Linear>().outputs(),
            Mlp::Experts(_) => hidden,
        };
        self.by_blocks(rows.len(), widest, &|r| {
            // SAFETY: these rows belong to this block.
            let x = unsafe { x.part(r.start * hidden..r.end * hidden) };
            let attn_out = Input::Rows(&attn_out[r.start * attn_width..r.end * attn_width], None);
            let Mlp::Dense(GatedMlp { gate_up, down }) = tail.mlp else {
                return self.add_branch(output, attn_out, tail.attention_post_norm, x);
            };
            let (gate_up, down) = (gate_up.storage::<Linear>(), down.storage::<Linear>());
            self.expect(gate_up);
            self.add_branch(output, attn_out, tail.attention_post_norm, x);
            self.expect(down);
            let active = self.gated(gate_up, tail.activation, Input::Rows(x, tail.mlp_norm), down);
            self.expect(tail.next.storage());
            self.add_branch(down, active.input(), tail.mlp_post_norm, x);
        });
        // Experts take all rows that chose them at once.
        if let Mlp::Experts(experts) = tail.mlp {
            self.add_experts(experts, tail, chosen);
        }
    }

    /// Calls `f` for blocks of rows, whose intermediate results have at most `widest` elements a row. If there are enough rows, each thread
    /// takes a block at a time through all steps, so that intermediate results stay in its caches; otherwise the threads share the work
    /// of each step.
    fn by_blocks(&self, rows: usize, widest: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        let threads = self.threads();
        if rows < MIN_ROWS_PER_THREAD * threads {
            return even_parts(rows, SHARED_ROWS).for_each(f);
        }
        let blocks = row_blocks(rows, widest, threads);
        self.parallel(blocks, &|b| f(b * rows / blocks..(b + 1) * rows / blocks));
    }

    /// x += post(input · Wᵀ + b)
    fn add_branch(&self, w: &Linear, input: Input<'_>, post: Option<Norm<'_>>, x: &mut [f32]) {
        let Some(post) = post else { return self.project_add(w, input, x) };
        let mut branch = scratch::borrow(&BRANCH, x.len());
        let branch = &mut branch.as_f32_mut()[..x.len()];
        self.project(w, input, Output::Rows(branch));
        self.add_normed(branch, Some(post), w.outputs(), x);
    }

    /// x += post(branch), rows of `width`.
    pub(crate) fn add_normed(&self, branch: &[f32], post: Option<Norm<'_>>, width: usize, x: &mut [f32]) {
        let x = DisjointMut::new(x);
        self.normed(branch, post, |normed| {
            self.by_rows(normed.len() / width, width, &|r| {
                let r = r.start * width..r.end * width;
                // SAFETY: these rows belong to this task.
                let x = unsafe { x.part(r.clone()) };
                x.iter_mut().zip(&normed[r]).for_each(|(x, y)| *x += y);
            });
        });
    }

    /// [`Device::project_qkv`] into keys and values of one type.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn project_qkv_to<E: Elem>(
        &self,
        x: &[f32],
        norm: Option<Norm<'_>>,
        w: &Linear,
        qk_norms: Option<QkNorms<'_>>,
        q: &mut [f32],
        k: &mut [E],
        v: &mut [E],
    ) {
        let (hidden, width) = (w.inputs(), w.outputs());
        let rows = x.len() / hidden;
        let q_width = q.len() / rows.max(1);
        let kv_width = (width - q_width) / 2;
        // Queries without a norm are written where they belong, if whole panels of the weights are theirs.
        let apart = qk_norms.is_none() && q_width.is_multiple_of(PANEL);
        let wide = if apart { width - q_width } else { width };
        let (q, k, v) = (DisjointMut::new(q), DisjointMut::new(k), DisjointMut::new(v));
        self.by_blocks(rows, width, &|r| {
            let mut scratch = scratch::borrow(&WIDE, r.len() * wide);
            let qkv = &mut scratch.as_f32_mut()[..r.len() * wide];
            let input = Input::Rows(&x[r.start * hidden..r.end * hidden], norm);
            if apart {
                // SAFETY: these rows belong to this block.
                let first = unsafe { q.part(r.start * q_width..r.end * q_width) };
                self.project(w, input, Output::Split { first, rest: qkv, at: q_width });
            } else {
                self.project(w, input, Output::Rows(qkv));
            }
            self.by_rows(r.len(), wide, &|part| {
                for i in part {
                    let (row, at) = (&qkv[i * wide..(i + 1) * wide], r.start + i);
                    // SAFETY: row `at` belongs to this task.
                    let (k, v) = unsafe {
                        let columns = at * kv_width..(at + 1) * kv_width;
                        (k.part(columns.clone()), v.part(columns))
                    };
                    let (q_row, kv_row) = row.split_at(wide - 2 * kv_width);
                    let (k_row, v_row) = kv_row.split_at(kv_width);
                    // SAFETY: as above; queries that lie apart have no columns here.
                    let q = unsafe { q.part(at * q_width..at * q_width + q_row.len()) };
                    match qk_norms {
                        None => {
                            q.copy_from_slice(q_row);
                            self.run(Round { src: k_row, out: k });
                        }
                        Some(QkNorms { q: q_norm, k: k_norm }) => {
                            self.run(RmsNorm { x: q_row, weight: q_norm.weight, eps: q_norm.eps, y: q });
                            let mut normed = scratch::borrow(&BRANCH, kv_width);
                            let y = &mut normed.as_f32_mut()[..kv_width];
                            self.run(RmsNorm { x: k_row, weight: k_norm.weight, eps: k_norm.eps, y });
                            self.run(Round { src: y, out: k });
                        }
                    }
                    self.run(Round { src: v_row, out: v });
                }
            });
        });
    }

    /// Calls `then` with the normalised rows, or with the rows themselves where there is no norm. Within a task, this thread normalises all of
    /// them.
    pub(crate) fn normed(&self, x: &[f32], norm: Option<Norm<'_>>, then: impl FnOnce(&[f32])) {
        let Some(norm) = norm else { return then(x) };
        if x.len() <= FEW {
            prefetch::to_read(x.as_ptr().cast(), size_of_val(x));
        }
        let mut normed = scratch::borrow(&NORMED, x.len());
        let normed = &mut normed.as_f32_mut()[..x.len()];
        self.rms_norm(x, norm.weight, norm.eps, normed);
        then(normed);
    }
}

/// Nearly equal parts of at most `most` rows. None of many is so small that other products would compute it.
pub(crate) fn even_parts(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let each = rows.div_ceil(rows.div_ceil(most).max(1)).max(1);
    (0..rows).step_by(each).map(move |first| first..(first + each).min(rows))
}

/// Number of blocks of rows: as many as the threads share out evenly. Their rows differ by one at most, so that none is so small that other products would
/// compute it.
fn row_blocks(rows: usize, widest: usize, threads: usize) -> usize {
    let most = (BLOCK_BYTES / (4 * widest.max(1))).clamp(MIN_ROWS_PER_THREAD, BLOCK_ROWS);
    rows.div_ceil(most).next_multiple_of(threads)
}

#[cfg(test)]
mod tests {
    use super::{MIN_ROWS_PER_THREAD, SHARED_ROWS, even_parts, row_blocks};

    #[test]
    fn no_part_of_many_rows_has_few() {
        assert_eq!(even_parts(0, SHARED_ROWS).count(), 0);
        for rows in [1, 4, 1024, 1025, 1028, 2049, 9000] {
            let parts: Vec<_> = even_parts(rows, SHARED_ROWS).collect();
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, rows));
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            let least = rows.min(SHARED_ROWS / 2);
            assert!(parts.iter().all(|part| (least..=SHARED_ROWS).contains(&part.len())), "{parts:?}");
        }
    }

    #[test]
    fn blocks_are_equal_and_small_where_the_network_is_wide() {
        // Two blocks of a prompt of 350 rows; 4,096 rows in blocks of a thread's cache.
        assert_eq!((row_blocks(350, 1536, 2), row_blocks(4096, 1536, 2)), (2, 8));
        // 18,944 floats a row are 75 KiB: 128 rows at least. 8,960 are 35 KiB: 175 rows would be 6 MiB.
        assert_eq!((row_blocks(4096, 18_944, 2), row_blocks(4096, 8960, 2)), (32, 24));
        // Blocks of 65 rows would leave two of 4,097 to the last.
        for (rows, threads) in [(256, 2), (999, 3), (4097, 16), (4097, 32), (8193, 64)] {
            let blocks = row_blocks(rows, 12_288, threads);
            assert!(blocks.is_multiple_of(threads), "{rows}, {threads}: {blocks}");
            assert!(rows / blocks >= MIN_ROWS_PER_THREAD / 2, "{rows}, {threads}: {blocks}");
        }
    }
}
