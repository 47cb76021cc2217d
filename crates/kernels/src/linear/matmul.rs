//! y (+)= x · Wᵀ + b over packed panels.
//!
//! Rows are packed in strips of 12. Blocks of rows fit the second-level cache, and the panel of a block of the sum fits the
//! first-level cache. A task is a block of rows with a run of panels.

use std::cell::Cell;

use super::activations::{Active, Input, Output, TaskOutput};
use super::blocking::{Blocking, MatmulPath};
use super::pack::{PackStrip, Rounding};
#[cfg(target_arch = "x86_64")]
use super::pack_amx;
use super::panel_task::{Epilogue, FEW_WORDS, PanelTask};
use super::quant_blocks::QuantizeRow;
use super::weights::{Activation, Linear, Precision};
use crate::cpu::Cpu;
use crate::device::Norm;
use crate::disjoint::DisjointMut;
use crate::prefetch;
use crate::scratch::{self, AlignedVec};
use crate::simd::PANEL;

/// Words of packed activations at a time.
const PACKED: usize = 2 << 20;

thread_local! {
    /// Packed activations.
    static X: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

impl Cpu {
    /// y (m × outputs) = x (m × inputs) · Wᵀ + b, m = x.len() / inputs.
    ///
    /// # Panics
    /// If the lengths do not fit, or the weights are gate and up projections.
    pub fn linear(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        self.project(w, Input::Rows(x, None), Output::Rows(y));
    }

    /// y += x · Wᵀ + b, as in [`Cpu::linear`] (residual connection).
    ///
    /// # Panics
    /// As [`Cpu::linear`].
    pub fn linear_add(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        self.project_add(w, Input::Rows(x, None), y);
    }

    /// y (m × width) = activation(x · Gᵀ + b) · (x · Uᵀ + c), weights packed by [`Linear::pack_gate_up`].
    ///
    /// # Panics
    /// If the lengths do not fit, or the weights are not gate and up projections.
    pub fn linear_gated(&self, w: &Linear, activation: Activation, x: &[f32], y: &mut [f32]) {
        assert!(w.gate_up.is_some(), "the weights are gate and up projections");
        self.product(w, Input::Rows(x, None), Output::Rows(y), Epilogue::Gated(activation));
    }

    /// y = input · Wᵀ + b
    pub(crate) fn project(&self, w: &Linear, input: Input<'_>, y: Output<'_>) {
        assert!(w.gate_up.is_none(), "gate and up projections are for `linear_gated`");
        self.product(w, input, y, Epilogue::Store);
    }

    /// y += input · Wᵀ + b
    pub(crate) fn project_add(&self, w: &Linear, input: Input<'_>, y: &mut [f32]) {
        assert!(w.gate_up.is_none(), "gate and up projections are for `linear_gated`");
        self.product(w, input, Output::Rows(y), Epilogue::Add);
    }

    /// activation(input · Gᵀ + b) · (input · Uᵀ + c) of `m` rows, which `next` takes. Where both products use tiles of AMX, the rows are
    /// written as `next` reads them: half the bytes of `f32`, once.
    pub(crate) fn gated(
        &self,
        w: &Linear,
        activation: Activation,
        input: Input<'_>,
        next: &Linear,
    ) -> Active {
        assert!(w.gate_up.is_some(), "the weights are gate and up projections");
        let m = input.rows(w.inputs);
        let mut active = Active::of(m, next, self, Blocking::of(w, self, m).path);
        self.product(w, input, active.output(), Epilogue::Gated(activation));
        active
    }

    fn product(&self, w: &Linear, input: Input<'_>, mut output: Output<'_>, epilogue: Epilogue) {
        let (m, width) = (input.rows(w.inputs), w.outputs());
        output.check(m, width);
        if m == 0 || width == 0 {
            return;
        }
        let blocking = Blocking::of(w, self, m);
        let (x, norm) = match input {
            Input::Rows(x, norm) => (x, norm),
            #[cfg(target_arch = "x86_64")]
            Input::Packed(packed, _) => {
                return self.multiply(w, m, blocking, packed, &output.of(0..m, width), epilogue);
            }
        };
        let rows = (PACKED / blocking.words).max(blocking.rows) / blocking.rows * blocking.rows;
        let mut scratch = scratch::borrow(&X, blocking.words * m.min(rows).next_multiple_of(blocking.strip));
        for (i, x) in x.chunks(rows * w.inputs).enumerate() {
            let count = x.len() / w.inputs;
            self.pack_rows(w, x, norm, blocking, scratch.as_u32_mut());
            let output = output.of(i * rows..i * rows + count, width);
            self.multiply(w, count, blocking, scratch.as_u32(), &output, epilogue);
        }
    }

    /// Packs `x`, after its norm if there is one, strip after strip; quantised rows lie one after another.
    fn pack_rows(
        &self,
        w: &Linear,
        x: &[f32],
        norm: Option<Norm<'_>>,
        blocking: Blocking,
        packed: &mut [u32],
    ) {
        let Blocking { strip, words, .. } = blocking;
        let rows = x.len() / w.inputs;
        if rows * words <= FEW_WORDS {
            // Other threads may have written these rows, and have read what was packed here before.
            prefetch::to_read(x.as_ptr().cast(), size_of_val(x));
            prefetch::to_write(packed.as_ptr().cast(), rows * words * size_of::<u32>());
        }
        let packed = DisjointMut::new(packed);
        if let MatmulPath::Q8Rows = blocking.path {
            return self.parallel_if(x.len() > 1 << 13, rows, &|r| {
                // SAFETY: row `r` belongs to task `r`.
                let out = unsafe { packed.part(r * words..(r + 1) * words) };
                let x = &x[r * w.inputs..(r + 1) * w.inputs];
                self.normed(x, norm, |x| self.run(QuantizeRow { x, out }));
            });
        }
        let rounding = match blocking.path {
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Integers(token) => Rounding::Integers(token),
            _ if w.precision == Precision::F32 => Rounding::F32,
            _ => Rounding::Pairs,
        };
        self.parallel_if(x.len() > 1 << 15, rows.div_ceil(strip), &|s| {
            let x = &x[s * strip * w.inputs..];
            let x = &x[..x.len().min(strip * w.inputs)];
            let width = blocking.width(x.len() / w.inputs);
            #[cfg(target_arch = "x86_64")]
            if let MatmulPath::Amx(token) = blocking.path {
                return self.normed(x, norm, |x| {
                    for part in pack_amx::parts(words, blocking.steps) {
                        let at = pack_amx::packed(&part, blocking.width(rows), s * strip, width);
                        // SAFETY: strip `s` belongs to task `s`.
                        pack_amx::pack(token, w.inputs, x, part, unsafe { packed.part(at) });
                    }
                });
            }
            // SAFETY: strip `s` belongs to task `s`.
            let dst = unsafe { packed.part(s * strip * words..(s * strip + width) * words) };
            self.normed(x, norm, |x| {
                self.run(PackStrip { rounding, inputs: w.inputs, x, width, dst });
            });
        });
    }

    fn multiply(
        &self,
        w: &Linear,
        m: usize,
        blocking: Blocking,
        packed: &[u32],
        y: &TaskOutput<'_>,
        epilogue: Epilogue,
    ) {
        let panels = w.outputs.div_ceil(PANEL);
        let blocks = m.div_ceil(blocking.rows);
        let limit = blocking.chunk(m);
        // Enough tasks that threads end at about the same time. One thread alone takes as much at a time as its caches hold.
        let tasks = if self.sharing() > 1 { 8 * self.sharing() } else { 1 };
        let chunk = (panels * blocks / tasks).clamp(1, limit);
        let chunk = panels.div_ceil(panels.div_ceil(chunk));
        // Panels of a gate and an up projection stay together.
        let chunk = if matches!(epilogue, Epilogue::Gated(_)) { chunk.next_multiple_of(2) } else { chunk };
        let chunks = panels.div_ceil(chunk);
        // Some ten microseconds of arithmetic or of reading weights.
        let worth = m * w.outputs * w.inputs > 1 << 21 || w.outputs * w.inputs > 1 << 17;
        self.parallel_if(worth, blocks * chunks, &|t| {
            let (block, c) = (t / chunks, t % chunks);
            self.run(PanelTask {
                w,
                blocking,
                packed,
                #[cfg(target_arch = "x86_64")]
                packed_rows: blocking.width(m),
                y,
                epilogue,
                rows: block * blocking.rows..((block + 1) * blocking.rows).min(m),
                panels: c * chunk..((c + 1) * chunk).min(panels),
            });
        });
    }
}
