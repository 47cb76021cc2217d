//! Digests of runs of tokens of a layer, so that some tokens can be read and verified without the others.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Problem;
use crate::header::{Entries, bad_value};
use crate::id::{ChunkId, Layout, hex};
use crate::layer::Layer;

/// Tokens of a block in files that are written now.
const TOKENS: usize = 64;
/// Bytes of a digest: the first of BLAKE3.
const DIGEST: usize = 16;
/// Name of the entry with the tokens of a block.
const SIZE: &str = "block";
/// How the names of the entries with digests begin and end.
const LAYER: &str = "layer.";
const DIGESTS: &str = ".blocks";

/// The digests of a chunk's blocks. Block `b` is tokens `size·b .. min(size·(b+1), tokens)`, and its digest is taken
/// over its keys followed by its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Tokens of the chunk, at least 1.
    tokens: usize,
    /// Tokens of a block, at least 1; the last block may have fewer.
    size: usize,
    /// Bytes of the keys of a layer's first block, and of its values: of every block's but the last.
    bytes: usize,
    /// For each layer the digests of its blocks, one after the other.
    digests: Vec<Vec<u8>>,
}

impl Blocks {
    fn new(size: usize, id: &ChunkId, layout: Layout) -> Blocks {
        let tokens = id.tokens.len();
        Blocks { tokens, size, bytes: size.min(tokens) * layout.row, digests: Vec::with_capacity(id.layers) }
    }

    /// The digests of a chunk's layers.
    pub(crate) fn of(id: &ChunkId, layout: Layout, layers: &[Layer]) -> Blocks {
        let mut blocks = Blocks::new(TOKENS, id, layout);
        for layer in layers {
            let digests = blocks.digests(layer).flatten().collect();
            blocks.digests.push(digests);
        }
        blocks
    }

    /// The digests that a header has; files of earlier builds have none.
    pub(crate) fn read(
        entries: &Entries<'_>,
        id: &ChunkId,
        layout: Layout,
    ) -> Result<Option<Blocks>, Problem> {
        let is_ours = |name: &str| name == SIZE || name.starts_with(LAYER) && name.ends_with(DIGESTS);
        if !entries.names().any(is_ours) {
            return Ok(None);
        }
        let size = entries.parse(SIZE)?;
        if size == 0 {
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
            entries.insert(name(layer), hex(digests));
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
        if expected.eq(self.digests(data)) { Ok(()) } else { Err(Problem::Checksum(layer)) }
    }

    /// The digests of blocks that follow each other in `data`. Only the chunk's last can be short, and it is last.
    fn digests<'a>(&self, data: &'a Layer) -> impl Iterator<Item = [u8; DIGEST]> + use<'a> {
        let (k, v) = data.as_bytes().split_at(data.bytes() / 2);
        k.chunks(self.bytes)
            .zip(v.chunks(self.bytes))
            .map(|(k, v)| digest(blake3::Hasher::new().update(k).update(v)))
    }

    /// Verifies a layer that comes piece by piece.
    pub(crate) fn stream(&self) -> Stream<'_> {
        Stream { blocks: self, hashers: vec![blake3::Hasher::new(); self.tokens.div_ceil(self.size)] }
    }
}

/// One hash for each block of a layer, thirty bytes a token where a block has 64: values follow all of the keys.
pub(crate) struct Stream<'a> {
    blocks: &'a Blocks,
    hashers: Vec<blake3::Hasher>,
}

impl Stream<'_> {
    /// Takes what lies `at` bytes after the beginning of the keys, or of the values once the keys are complete.
    pub(crate) fn update(&mut self, mut at: usize, mut piece: &[u8]) {
        let bytes = self.blocks.bytes;
        while !piece.is_empty() {
            let (now, rest) = piece.split_at(piece.len().min(bytes - at % bytes));
            self.hashers[at / bytes].update(now);
            at += now.len();
            piece = rest;
        }
    }

    pub(crate) fn check(self, layer: usize) -> Result<(), Problem> {
        let found = self.hashers.iter().flat_map(digest);
        if found.eq(self.blocks.digests[layer].iter().copied()) {
            Ok(())
        } else {
            Err(Problem::Checksum(layer))
        }
    }
}

fn digest(hasher: &blake3::Hasher) -> [u8; DIGEST] {
    let mut out = [0; DIGEST];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST]);
    out
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
