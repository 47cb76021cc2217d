//! The chunk file: a safetensors file whose header says what the chunk is. See `docs/chunk-file.md`.
//!
//! Everything read here is untrusted: lengths are bounded by the bytes that remain before memory is taken for them.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read};
use std::str::FromStr;

use refrain_kernels::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;

use crate::id::{Layout, VERSION, hex, parse_hex};
use crate::layer::Layer;
use crate::{Chunk, ChunkId, Problem};

/// Value of the `format` entry.
const FORMAT: &str = "refrain-chunk";
/// Name of the entry with the checksum of all others.
const HEADER_CHECKSUM: &str = "header.blake3";
/// Longest header in bytes: more than a million tokens. Parsing takes several times as much memory.
pub(crate) const MAX_HEADER: u64 = 16 << 20;
/// Bytes read at once where a layer is only verified.
const BLOCK: usize = 1 << 20;

/// The first part of a chunk file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: ChunkId,
    pub(crate) label: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// BLAKE3 of each layer's keys followed by its values.
    pub(crate) checksums: Vec<[u8; 32]>,
}

/// The header's JSON, in the order in which it is written.
#[derive(Serialize)]
struct Json {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// The header of a chunk, with the checksums of its layers.
    pub(crate) fn of(chunk: &Chunk) -> Header {
        let checksum = |layer: &Layer| *blake3::hash(layer.as_bytes()).as_bytes();
        let checksums = chunk.data().iter().map(checksum).collect();
        Header {
            id: chunk.id().clone(),
            label: chunk.label().to_owned(),
            created: chunk.created(),
            checksums,
        }
    }

    /// Bytes of a layer.
    pub(crate) fn layer_bytes(&self) -> usize {
        self.id.layout().map_or(0, |layout| 2 * layout.tensor)
    }

    /// Length of the JSON (8 bytes), JSON, spaces up to a multiple of 8.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let json = Json { metadata: self.metadata(), tensors: tensors(&self.id) };
        let mut out = vec![0; 8];
        serde_json::to_writer(&mut out, &json).expect("strings and numbers go into memory");
        out.resize(out.len().next_multiple_of(8), b' ');
        let length = (out.len() - 8) as u64;
        out[..8].copy_from_slice(&length.to_le_bytes());
        out
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
        let checksum = header_checksum(entries.iter());
        entries.insert(HEADER_CHECKSUM.to_owned(), checksum);
        entries
    }

    /// Reads the header of a file of `len` bytes and verifies it: format, version, checksum of the header, shape and
    /// place of every tensor, length of the file. Layers are not read.
    pub(crate) fn read(reader: &mut dyn Read, len: u64) -> Result<Header, Problem> {
        let mut length = [0; 8];
        read_exact(reader, &mut length, len, 8)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER {
            return Err(Problem::Header(format!("it claims {length} bytes, more than {MAX_HEADER}")));
        }
        if length > len - 8 {
            return Err(Problem::Length { expected: 8 + length, found: len });
        }
        // At most MAX_HEADER and at most what the file has.
        let mut json = vec![0; length as usize];
        read_exact(reader, &mut json, len, 8 + length)?;
        let metadata: Metadata =
            serde_json::from_slice(&json).map_err(|error| Problem::Header(error.to_string()))?;
        let header = Header::parse(metadata.metadata().as_ref())?;
        let layout = header.check_tensors(&metadata)?;
        let expected = (8 + length).saturating_add(layout.total as u64);
        if expected != len {
            return Err(Problem::Length { expected, found: len });
        }
        Ok(header)
    }

    fn parse(entries: Option<&HashMap<String, String>>) -> Result<Header, Problem> {
        let entries = Entries(entries.ok_or_else(|| Problem::Header("it has no __metadata__".to_owned()))?);
        if entries.text("format")? != FORMAT {
            return Err(Problem::Header(format!("its format is not '{FORMAT}'")));
        }
        let version = entries.text("version")?;
        if version != VERSION.to_string() {
            return Err(Problem::UnknownVersion(version.chars().take(20).collect()));
        }
        entries.check()?;
        let id = ChunkId {
            model: entries.digest("model")?,
            dtype: entries.parse("dtype")?,
            layers: entries.parse("layers")?,
            kv_heads: entries.parse("kv_heads")?,
            head_dim: entries.parse("head_dim")?,
            bos: entries.parse("bos")?,
            namespace: entries.text("namespace")?.to_owned(),
            tokens: serde_json::from_str(entries.text("tokens")?)
                .map_err(|error| Problem::Header(format!("'tokens': {error}")))?,
        };
        id.layout().map_err(|error| Problem::Header(error.to_string()))?;
        let checksums =
            (0..id.layers).map(|layer| entries.digest(&checksum_name(layer))).collect::<Result<_, _>>()?;
        let (label, created) = (entries.text("label")?.to_owned(), entries.parse("created")?);
        Ok(Header { id, label, created, checksums })
    }

    /// Every tensor must be where the identity puts it, and there must be no other.
    fn check_tensors(&self, metadata: &Metadata) -> Result<Layout, Problem> {
        let expected = tensors(&self.id);
        if metadata.offset_keys().len() != expected.len() {
            return Err(Problem::Header(format!("it does not name {} tensors", expected.len())));
        }
        for (name, expected) in &expected {
            let found = metadata.info(name).is_some_and(|found| {
                found.dtype == expected.dtype
                    && found.shape == expected.shape
                    && found.data_offsets == expected.data_offsets
            });
            if !found {
                return Err(Problem::Header(format!("tensor '{name}' is not as its metadata says")));
            }
        }
        self.id.layout().map_err(|error| Problem::Header(error.to_string()))
    }
}

/// All tensors of a chunk, layer after layer, keys before values, in a layout that has been checked.
fn tensors(id: &ChunkId) -> BTreeMap<String, TensorInfo> {
    let dtype = match id.dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
    };
    let shape = vec![id.tokens.len(), id.kv_heads, id.head_dim];
    let size = shape.iter().product::<usize>() * id.dtype.size();
    let tensor = |index: usize| {
        let name = format!("layer.{:03}.{}", index / 2, if index.is_multiple_of(2) { "k" } else { "v" });
        (name, TensorInfo { dtype, shape: shape.clone(), data_offsets: (index * size, (index + 1) * size) })
    };
    (0..2 * id.layers).map(tensor).collect()
}

fn checksum_name(layer: usize) -> String {
    format!("layer.{layer:03}.blake3")
}

/// BLAKE3 over all entries but itself, ascending by name: length and bytes of the name, length and bytes of the value.
pub(crate) fn header_checksum<'a>(entries: impl Iterator<Item = (&'a String, &'a String)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, value) in entries.filter(|(name, _)| *name != HEADER_CHECKSUM) {
        for text in [name, value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    hex(hasher.finalize().as_bytes())
}

/// The entries of `__metadata__`.
struct Entries<'a>(&'a HashMap<String, String>);

impl Entries<'_> {
    fn text(&self, name: &str) -> Result<&str, Problem> {
        let missing = || Problem::Header(format!("its metadata has no '{name}'"));
        self.0.get(name).map(String::as_str).ok_or_else(missing)
    }

    fn parse<T: FromStr>(&self, name: &str) -> Result<T, Problem> {
        self.text(name)?.parse().map_err(|_| bad_value(name))
    }

    fn digest(&self, name: &str) -> Result<[u8; 32], Problem> {
        parse_hex(self.text(name)?).ok_or_else(|| bad_value(name))
    }

    fn check(&self) -> Result<(), Problem> {
        let sorted: BTreeMap<&String, &String> = self.0.iter().collect();
        let same = header_checksum(sorted.into_iter()) == self.text(HEADER_CHECKSUM)?;
        if same { Ok(()) } else { Err(Problem::HeaderChecksum) }
    }
}

fn bad_value(name: &str) -> Problem {
    Problem::Header(format!("'{name}' has no meaning"))
}

/// Reads what follows the header, verifying each layer while it is in the CPU's cache.
pub(crate) fn read_layers(header: Header, reader: &mut dyn Read) -> Result<Chunk, Problem> {
    let read = |layer| {
        let data = read_layer(&header, reader, layer)?;
        check_layer(&header, layer, &data)?;
        Ok(data)
    };
    let data = (0..header.id.layers).map(read).collect::<Result<_, _>>()?;
    let Header { id, label, created, .. } = header;
    Chunk::from_parts(id, label, created, data).map_err(|error| Problem::Header(error.to_string()))
}

/// Reads the layer at which `reader` stands.
pub(crate) fn read_layer(header: &Header, reader: &mut dyn Read, layer: usize) -> Result<Layer, Problem> {
    let len = header.layer_bytes();
    Layer::read(reader, header.id.dtype, len)
        .map_err(|error| trouble(&error, (len * header.id.layers) as u64, (len * layer) as u64))
}

/// Verifies the checksum of a layer.
pub(crate) fn check_layer(header: &Header, layer: usize, data: &Layer) -> Result<(), Problem> {
    if blake3::hash(data.as_bytes()) == header.checksums[layer] {
        Ok(())
    } else {
        Err(Problem::Checksum(layer))
    }
}

/// Reads what follows the header and verifies it in bounded memory.
pub(crate) fn verify_layers(header: &Header, reader: &mut dyn Read) -> Result<(), Problem> {
    let layout = header.id.layout().map_err(|error| Problem::Header(error.to_string()))?;
    let mut block = vec![0; BLOCK.min(2 * layout.tensor)];
    for (layer, checksum) in header.checksums.iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        let mut left = 2 * layout.tensor;
        while left > 0 {
            let part = &mut block[..left.min(BLOCK)];
            let read = (layer + 1) * 2 * layout.tensor - left;
            reader.read_exact(part).map_err(|error| trouble(&error, layout.total as u64, read as u64))?;
            hasher.update(part);
            left -= part.len();
        }
        if hasher.finalize() != *checksum {
            return Err(Problem::Checksum(layer));
        }
    }
    Ok(())
}

fn read_exact(reader: &mut dyn Read, out: &mut [u8], len: u64, needed: u64) -> Result<(), Problem> {
    if len < needed {
        return Err(Problem::Length { expected: needed, found: len });
    }
    reader.read_exact(out).map_err(|error| trouble(&error, needed, len))
}

/// A file that shrinks while it is read is truncated; everything else is the system's trouble.
fn trouble(error: &std::io::Error, expected: u64, found: u64) -> Problem {
    match error.kind() {
        ErrorKind::UnexpectedEof => Problem::Length { expected, found },
        _ => Problem::Io(error.to_string()),
    }
}
