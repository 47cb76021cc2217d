//! The chunk file: a safetensors file whose header says what the chunk is. See `docs/chunk-file.md`.
//!
//! Everything read here is untrusted: lengths are bounded by the bytes that remain before memory is taken for them.

use std::collections::BTreeMap;
use std::io::{Read, Seek};
use std::ops::Range;

use safetensors::tensor::TensorInfo;

use crate::blocks::Blocks;
use crate::header::{Entries, Raw, encode, stored_as, trouble};
use crate::id::{Layout, VERSION, hex};
use crate::layer::Layer;
use crate::{Chunk, ChunkId, Problem};

/// Value of the `format` entry.
const FORMAT: &str = "refrain-chunk";
/// Longest header in bytes: hundreds of thousands of tokens. Parsing takes several times as much memory.
pub(crate) const MAX_HEADER: u64 = 16 << 20;
/// Bytes read at once where a layer is only verified.
const PIECE: usize = 1 << 20;

/// The first part of a chunk file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: ChunkId,
    pub(crate) layout: Layout,
    pub(crate) label: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// BLAKE3 of each layer's keys followed by its values.
    pub(crate) checksums: Vec<[u8; 32]>,
    /// Files of earlier builds have none.
    pub(crate) blocks: Option<Blocks>,
}

impl Header {
    /// The header of a chunk, with the checksums of its layers and their blocks.
    pub(crate) fn of(chunk: &Chunk) -> Header {
        let checksum = |layer: &Layer| *blake3::hash(layer.as_bytes()).as_bytes();
        Header {
            id: chunk.id().clone(),
            layout: chunk.layout(),
            label: chunk.label().to_owned(),
            created: chunk.created(),
            checksums: chunk.data().iter().map(checksum).collect(),
            blocks: Some(Blocks::of(chunk.id(), chunk.layout(), chunk.data())),
        }
    }

    /// The bytes before the first layer.
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self.metadata(), tensors(&self.id, self.layout))
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let id = &self.id;
        let tokens = serde_json::to_string(&id.tokens).expect("numbers go into a string");
        let mut entries: BTreeMap<String, String> = [
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_string()),
            ("model", hex(&id.model)),
            ("dtype", id.dtype.to_string()),
            ("layers", id.layers.to_string()),
            ("kv_heads", id.kv_heads.to_string()),
            ("head_dim", id.head_dim.to_string()),
            ("bos", id.bos.to_string()),
            ("namespace", id.namespace.clone()),
            ("tokens", tokens),
            ("label", self.label.clone()),
            ("created", self.created.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        for (layer, checksum) in self.checksums.iter().enumerate() {
            entries.insert(checksum_name(layer), hex(checksum));
        }
        if let Some(blocks) = &self.blocks {
            blocks.write(&mut entries);
        }
        entries
    }

    /// Reads the header of a file of `len` bytes and verifies it: format, version, checksum of the header, shape and
    /// place of every tensor, length of the file. Layers are not read.
    pub(crate) fn read(reader: &mut dyn Read, len: u64) -> Result<Header, Problem> {
        let raw = Raw::read(reader, len, MAX_HEADER)?;
        let header = Header::parse(&raw.entries(FORMAT, VERSION)?)?;
        raw.check(&tensors(&header.id, header.layout), header.layout.total)?;
        Ok(header)
    }

    fn parse(entries: &Entries<'_>) -> Result<Header, Problem> {
        let id = ChunkId {
            model: entries.digest("model")?,
            dtype: entries.parse("dtype")?,
            layers: entries.parse("layers")?,
            kv_heads: entries.parse("kv_heads")?,
            head_dim: entries.parse("head_dim")?,
            bos: entries.parse("bos")?,
            namespace: entries.text("namespace")?.to_owned(),
            tokens: entries.json("tokens")?,
        };
        let layout = id.layout().map_err(|error| Problem::Header(error.to_string()))?;
        let checksums =
            (0..id.layers).map(|layer| entries.digest(&checksum_name(layer))).collect::<Result<_, _>>()?;
        let blocks = Blocks::read(entries, &id, layout)?;
        let (label, created) = (entries.text("label")?.to_owned(), entries.parse("created")?);
        Ok(Header { id, layout, label, created, checksums, blocks })
    }
}

/// All tensors of a chunk, layer after layer, keys before values.
fn tensors(id: &ChunkId, layout: Layout) -> BTreeMap<String, TensorInfo> {
    let shape = vec![id.tokens.len(), id.kv_heads, id.head_dim];
    let (dtype, size) = (stored_as(id.dtype), layout.tensor);
    let tensor = |index: usize| {
        let name = format!("layer.{:03}.{}", index / 2, if index.is_multiple_of(2) { "k" } else { "v" });
        (name, TensorInfo { dtype, shape: shape.clone(), data_offsets: (index * size, (index + 1) * size) })
    };
    (0..2 * id.layers).map(tensor).collect()
}

fn checksum_name(layer: usize) -> String {
    format!("layer.{layer:03}.blake3")
}

/// Reads what follows the header, verifying each layer while it is in the CPU's cache.
pub(crate) fn read_layers(header: Header, reader: &mut dyn Read) -> Result<Chunk, Problem> {
    let (len, whole) = (2 * header.layout.tensor, 0..header.id.tokens.len());
    let read = |layer| {
        let data = Layer::read(reader, header.id.dtype, len)
            .map_err(|error| trouble(&error, header.layout.total as u64, (len * layer) as u64))?;
        check_layer(&header, layer, &data)?;
        header
            .blocks
            .iter()
            .try_for_each(|blocks| blocks.check(layer, std::slice::from_ref(&whole), &data))?;
        Ok(data)
    };
    let data = (0..header.id.layers).map(read).collect::<Result<_, _>>()?;
    let Header { id, label, created, .. } = header;
    Chunk::from_parts(id, label, created, data).map_err(|error| Problem::Header(error.to_string()))
}

/// Reads the tokens `runs` (ascending, disjoint) of a layer from a file whose layers begin at `start`. Nothing about
/// them is verified.
pub(crate) fn read_runs(
    header: &Header,
    file: &mut (impl Read + Seek),
    start: u64,
    layer: usize,
    runs: &[Range<usize>],
) -> Result<Layer, Problem> {
    let Layout { row, tensor, total } = header.layout;
    let mut parts: Vec<(u64, usize)> = Vec::with_capacity(2 * runs.len());
    for half in [2 * layer, 2 * layer + 1] {
        for run in runs {
            let (offset, len) = (start + (tensor * half + row * run.start) as u64, row * run.len());
            match parts.last_mut() {
                // The values of the first tokens follow the keys of the last.
                Some((before, length)) if *before + *length as u64 == offset => *length += len,
                _ => parts.push((offset, len)),
            }
        }
    }
    Layer::gather(file, header.id.dtype, &parts)
        .map_err(|error| trouble(&error, total as u64, (2 * tensor * layer) as u64))
}

/// Verifies the checksum of a layer.
pub(crate) fn check_layer(header: &Header, layer: usize, data: &Layer) -> Result<(), Problem> {
    if blake3::hash(data.as_bytes()) == header.checksums[layer] {
        Ok(())
    } else {
        Err(Problem::Checksum(layer))
    }
}

/// Reads what follows the header and verifies it, layers and blocks, in bounded memory.
pub(crate) fn verify_layers(header: &Header, reader: &mut dyn Read) -> Result<(), Problem> {
    let Layout { tensor, total, .. } = header.layout;
    let mut piece = vec![0; PIECE.min(tensor)];
    for (layer, checksum) in header.checksums.iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        let mut blocks = header.blocks.as_ref().map(Blocks::stream);
        for half in [2 * layer, 2 * layer + 1] {
            let mut read = 0;
            while read < tensor {
                let piece = &mut piece[..PIECE.min(tensor - read)];
                let before = (tensor * half + read) as u64;
                reader.read_exact(piece).map_err(|error| trouble(&error, total as u64, before))?;
                hasher.update(piece);
                if let Some(blocks) = &mut blocks {
                    blocks.update(read, piece);
                }
                read += piece.len();
            }
        }
        if hasher.finalize() != *checksum {
            return Err(Problem::Checksum(layer));
        }
        blocks.map_or(Ok(()), |blocks| blocks.check(layer))?;
    }
    Ok(())
}
