//! The operands of a register tile, and the sizes that packed data and kernels agree on.

/// Columns (outputs of a product, or slots) that one panel holds.
pub(crate) const PANEL: usize = 32;

/// Slots of one tile of keys, and with that the row stride of a tile of attention probabilities.
pub(crate) const KEYS: usize = 64;

/// Rows of a full strip of packed activations.
pub(crate) const STRIP: usize = 12;

/// Width that a strip of `rows` (1 ..= 12) rows is packed with: the smallest width that has a register tile.
pub(crate) fn strip_width(rows: usize) -> usize {
    [1, 2, 4, 6, 8].into_iter().find(|w| rows <= *w).unwrap_or(STRIP)
}

/// Where a tile's operands lie. Strides count 32-bit words.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Steps of the sum: inputs, or pairs of inputs.
    pub(crate) k: usize,
    /// Weights; column `c` of step 0 is at (c / 32) · ps + c % 32.
    pub(crate) w: *const u32,
    /// From one step's weights to the next.
    pub(crate) ws: usize,
    /// From one panel of 32 columns to the next.
    pub(crate) ps: usize,
    /// Activations of row 0, step 0.
    pub(crate) x: *const u32,
    /// From one step's activations to the next; the second word of a pair counts as a step.
    pub(crate) ks: usize,
    /// Results, `f32`; column `c` of row `r` is at (c / 32) · cps + r · cs + c % 32.
    pub(crate) c: *mut f32,
    /// From one row of results to the next.
    pub(crate) cs: usize,
    /// From one panel of results to the next.
    pub(crate) cps: usize,
    /// Columns, a multiple of 16.
    pub(crate) cols: usize,
    /// Whether the sum goes on from what `c` holds. Otherwise it starts at 0.
    pub(crate) add: bool,
}
