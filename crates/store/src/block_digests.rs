//! Digests of runs of tokens of a layer, so that some tokens can be read and verified without the others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::slice;

use twox_hash::xxhash3_128;

use crate::Problem;
use crate::header::{Entries, bad_value};
use crate::hex;
use crate::id::ChunkId;
use crate::kv_quant::{GROUP, Layout};
use crate::layer::Layer;

/// Tokens of a block in files that are written now.
const TOKENS: usize = 64;
/// Bytes of a digest: XXH3 of 128 bits, big-endian. It finds accidents at the speed of memory.
const DIGEST: usize = 16;
/// Name of the entry with the tokens of a block.
const SIZE: &str = "block.tokens";
/// How the names of the entries with digests begin and end.
const LAYER: &str = "layer.";
const DIGESTS: &str = ".blocks.xxh3";

/// The digests of a chunk's blocks. Block `b` is tokens `size·b .. min(size·(b+1), tokens)`, and its digest is taken
/// over what the layer's parts hold of them, part after part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Tokens of the chunk, at least 1.
    tokens: usize,
    /// Tokens of a block, at least 1; the last block may have fewer.
    size: usize,
    layout: Layout,
    /// For each layer the digests of its blocks, one after the other.
    digests: Vec<Vec<u8>>,
}

impl Blocks {
    fn new(size: usize, id: &ChunkId, layout: &Layout) -> Blocks {
        let digests = Vec::with_capacity(id.layers);
        Blocks { tokens: id.tokens.len(), size, layout: layout.clone(), digests }
    }

    /// Blocks of a chunk that is written now, of no layer yet.
    pub(crate) fn of(id: &ChunkId, layout: &Layout) -> Blocks {
        Blocks::new(TOKENS, id, layout)
    }

    /// Adds the digests of the next layer.
    pub(crate) fn push(&mut self, layer: &Layer) {
        let whole = 0..self.tokens;
        let digests = self.digests(slice::from_ref(&whole), layer).flatten().collect();
        self.digests.push(digests);
    }

    /// The digests that a header has; files of earlier builds have none.
    pub(crate) fn read(
        entries: &Entries<'_>,
        id: &ChunkId,
        layout: &Layout,
    ) -> Result<Option<Blocks>, Problem> {
        let is_ours = |name: &str| name == SIZE || name.starts_with(LAYER) && name.ends_with(DIGESTS);
        if !entries.names().any(is_ours) {
            return Ok(None);
        }
        let size = entries.parse(SIZE)?;
        if size == 0 || !layout.is_exact() && size % GROUP != 0 {
            return Err(bad_value(SIZE));
        }
        let mut blocks = Blocks::new(size, id, layout);
        // At most as many as tokens, and no digit is read unless there are as many as this asks for.
        let bytes = blocks.tokens.div_ceil(blocks.size).saturating_mul(DIGEST);
        for layer in 0..id.layers {
            blocks.digests.push(entries.bytes(&name(layer), bytes)?);
        }
        Ok(Some(blocks))
    }

    /// Adds what [`Blocks::read`] reads.
    pub(crate) fn write(&self, entries: &mut BTreeMap<String, String>) {
        entries.insert(SIZE.to_owned(), self.size.to_string());
        for (layer, digests) in self.digests.iter().enumerate() {
            entries.insert(name(layer), hex::encode(digests));
        }
    }

    /// The tokens of the blocks that hold `ranges` (ascending, disjoint), neighbouring blocks as one run.
    pub(crate) fn around(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let start = range.start - range.start % self.size;
            let end = self.tokens.min(range.end.div_ceil(self.size).saturating_mul(self.size));
            match runs.last_mut() {
                Some(last) if start <= last.end => last.end = end,
                _ => runs.push(start..end),
            }
        }
        runs
    }

    /// Verifies the tokens `runs`, which [`Blocks::around`] gave, of a layer.
    pub(crate) fn check(&self, layer: usize, runs: &[Range<usize>], data: &Layer) -> Result<(), Problem> {
        let blocks = runs.iter().flat_map(|run| run.start / self.size..run.end.div_ceil(self.size));
        let expected = blocks.map(|block| &self.digests[layer][DIGEST * block..][..DIGEST]);
        if expected.eq(self.digests(runs, data)) { Ok(()) } else { Err(Problem::Checksum(layer)) }
    }

    /// The digests of the blocks of `runs`, which follow each other in `data`. Only the chunk's last can be short, and it
    /// is last.
    fn digests<'a>(
        &self,
        runs: &[Range<usize>],
        data: &'a Layer,
    ) -> impl Iterator<Item = [u8; DIGEST]> + use<'a> {
        let (here, size) = (self.layout.only(runs), self.size);
        let tokens: usize = runs.iter().map(Range::len).sum();
        (0..tokens.div_ceil(size)).map(move |block| {
            let block = size * block..tokens.min(size.saturating_mul(block + 1));
            let mut hasher = xxhash3_128::Hasher::new();
            for place in here.places(slice::from_ref(&block)) {
                hasher.write(&data.as_bytes()[place]);
            }
            hasher.finish_128().to_be_bytes()
        })
    }
}

fn name(layer: usize) -> String {
    format!("{LAYER}{layer:03}{DIGESTS}")
}

/// Where the tokens of `ranges` lie in `runs` that are put one after the other. Each range lies within a run, and both
/// are ascending.
pub(crate) fn within(ranges: &[Range<usize>], mut runs: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut before = 0;
    let place = |range: &Range<usize>| {
        while runs[0].end < range.end {
            before += runs[0].len();
            runs = &runs[1..];
        }
        let start = before + range.start - runs[0].start;
        start..start + range.len()
    };
    ranges.iter().filter(|range| !range.is_empty()).map(place).collect()
}
