//! The chunk file: a safetensors file whose header says what the chunk is. See `docs/chunk-file.md`.
//!
//! Everything read here is untrusted: lengths are bounded by the bytes that remain before memory is taken for them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;

use safetensors::tensor::TensorInfo;

use crate::block_digests::Blocks;
use crate::chunk::Provenance;
use crate::header::{Entries, Raw, bad_value, encode, trouble};
use crate::hex;
use crate::id::{VERSIONS, WITH_NUMERICS};
use crate::kv_quant::Layout;
use crate::layer::Layer;
use crate::rooms::{Room, new_rooms};
use crate::{Chunk, ChunkId, KvQuantization, Problem};

/// Value of the `format` entry.
const FORMAT: &str = "refrain-chunk";
/// Longest header in bytes: hundreds of thousands of tokens. Parsing takes several times as much memory.
pub(crate) const MAX_HEADER: u64 = 16 << 20;

/// The first part of a chunk file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: ChunkId,
    pub(crate) layout: Layout,
    pub(crate) provenance: Provenance,
    /// BLAKE3 of each layer's bytes.
    pub(crate) checksums: Vec<[u8; 32]>,
    /// Files of earlier builds have none.
    pub(crate) blocks: Option<Blocks>,
}

impl Header {
    /// The header of a chunk, with the checksums of its layers and their blocks.
    pub(crate) fn of(chunk: &Chunk) -> Header {
        let mut blocks = Blocks::of(chunk.id(), chunk.layout());
        // Both digests of a layer while it is in the cache.
        let checksum = |layer: &Layer| {
            blocks.push(layer);
            *blake3::hash(layer.as_bytes()).as_bytes()
        };
        Header {
            checksums: chunk.data().iter().map(checksum).collect(),
            id: chunk.id().clone(),
            layout: chunk.layout().clone(),
            provenance: chunk.provenance().clone(),
            blocks: Some(blocks),
        }
    }

    /// Bytes of all layers.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.layer * self.id.layers
    }

    /// The bytes before the first layer.
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self.metadata(), tensors(&self.id, &self.layout))
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        let id = &self.id;
        let tokens = serde_json::to_string(&id.tokens).expect("numbers go into a string");
        let mut entries: BTreeMap<String, String> = [
            ("format", FORMAT.to_owned()),
            ("version", VERSIONS[id.format()].to_string()),
            ("model", hex::encode(&id.model)),
            ("dtype", id.dtype.to_string()),
            ("layers", id.layers.to_string()),
            ("kv_heads", id.kv_heads.to_string()),
            ("head_dim", id.head_dim.to_string()),
            ("bos", id.bos.to_string()),
            ("namespace", id.namespace.clone()),
            ("tokens", tokens),
            ("label", self.provenance.label.clone()),
            ("created", self.provenance.created.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if id.quantization != KvQuantization::Exact {
            entries.insert("encoding".to_owned(), id.quantization.encoding().to_owned());
        }
        if let Some(prefix) = &id.prefix {
            entries.insert("prefix".to_owned(), hex::encode(prefix));
        }
        if let Some(numerics) = &self.provenance.numerics {
            entries.insert("numerics".to_owned(), numerics.clone());
        }
        for (layer, checksum) in self.checksums.iter().enumerate() {
            entries.insert(checksum_name(layer), hex::encode(checksum));
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
        let entries = raw.entries(FORMAT, &VERSIONS)?;
        let header = Header::parse(&entries)?;
        if entries.text("version")? != VERSIONS[header.id.format()].to_string() {
            return Err(bad_value("version"));
        }
        raw.check(&tensors(&header.id, &header.layout), header.bytes())?;
        Ok(header)
    }

    fn parse(entries: &Entries<'_>) -> Result<Header, Problem> {
        let numerics =
            entries.has("numerics").then(|| entries.text("numerics").map(str::to_owned)).transpose()?;
        let is_identity = entries.text("version")? == VERSIONS[WITH_NUMERICS].to_string();
        let id = ChunkId {
            model: entries.digest("model")?,
            dtype: entries.parse("dtype")?,
            quantization: if entries.has("encoding") {
                encoding(entries.text("encoding")?, entries.text("version")?)?
            } else {
                KvQuantization::Exact
            },
            layers: entries.parse("layers")?,
            kv_heads: entries.parse("kv_heads")?,
            head_dim: entries.parse("head_dim")?,
            bos: entries.parse("bos")?,
            prefix: entries.has("prefix").then(|| entries.digest("prefix")).transpose()?,
            numerics: numerics.clone().filter(|_| is_identity),
            namespace: entries.text("namespace")?.to_owned(),
            tokens: entries.json("tokens")?,
        };
        let layout = id.layout().map_err(|error| Problem::Header(error.to_string()))?;
        let checksums =
            (0..id.layers).map(|layer| entries.digest(&checksum_name(layer))).collect::<Result<_, _>>()?;
        let blocks = Blocks::read(entries, &id, &layout)?;
        let label = entries.text("label")?.to_owned();
        let provenance = Provenance { label, numerics, created: entries.parse("created")? };
        Ok(Header { id, layout, provenance, checksums, blocks })
    }
}

/// The quantization of this name in a file of a known version. Files of earlier builds may have others, and stay as they are.
fn encoding(name: &str, version: &str) -> Result<KvQuantization, Problem> {
    let known = KvQuantization::ALL.into_iter().find(|quantization| quantization.encoding() == name);
    let name = || name.chars().take(20).collect::<String>();
    known.ok_or_else(|| Problem::UnknownVersion(format!("{version} with the encoding {}", name())))
}

impl Chunk {
    /// Reads a whole chunk file, as [`Chunk::to_bytes`] makes it, and verifies everything about it.
    ///
    /// # Errors
    /// The fault of the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Chunk, Problem> {
        let mut reader = bytes;
        let header = Header::read(&mut reader, bytes.len() as u64)?;
        read_layers(header, &mut reader)
    }

    /// The bytes of the chunk's file: always the same for the same content, label and time of creation.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Header::of(self).encode();
        self.data().iter().for_each(|layer| out.extend_from_slice(layer.as_bytes()));
        out
    }
}

/// All tensors of a chunk, layer after layer.
fn tensors(id: &ChunkId, layout: &Layout) -> BTreeMap<String, TensorInfo> {
    let mut tensors = BTreeMap::new();
    for layer in 0..id.layers {
        for part in &layout.parts {
            let start = layer * layout.layer + part.start;
            let data_offsets = (start, start + part.bytes());
            let info = TensorInfo { dtype: part.dtype, shape: part.shape.clone(), data_offsets };
            tensors.insert(format!("layer.{layer:03}.{}", part.name), info);
        }
    }
    tensors
}

fn checksum_name(layer: usize) -> String {
    format!("layer.{layer:03}.blake3")
}

/// Reads what follows the header, verifying each layer while it is in the CPU's cache.
pub(crate) fn read_layers(header: Header, reader: &mut dyn Read) -> Result<Chunk, Problem> {
    let rooms = new_rooms(header.layout.layer, header.id.layers).into_iter().enumerate();
    let data = rooms.map(|(layer, room)| next_layer(&header, reader, layer, room));
    let data = data.collect::<Result<_, _>>()?;
    let Header { id, provenance, .. } = header;
    Chunk::from_parts(id, provenance, data).map_err(|error| Problem::Header(error.to_string()))
}

/// Reads the layer that comes next into `room` and verifies it.
fn next_layer(
    header: &Header,
    reader: &mut dyn Read,
    layer: usize,
    mut room: Room,
) -> Result<Layer, Problem> {
    let before = (room.len() * layer) as u64;
    let bytes = room.next(room.len());
    reader.read_exact(bytes).map_err(|error| trouble(&error, header.bytes() as u64, before))?;
    check_all(header, layer, Layer::new(header.id.dtype, room))
}

/// Verifies the checksum of a layer and its blocks.
pub(crate) fn check_all(header: &Header, layer: usize, data: Layer) -> Result<Layer, Problem> {
    check_layer(header, layer, &data)?;
    let whole = 0..header.id.tokens.len();
    let mut blocks = header.blocks.iter();
    blocks.try_for_each(|blocks| blocks.check(layer, std::slice::from_ref(&whole), &data))?;
    Ok(data)
}

/// Reads the tokens `runs` (ascending, disjoint) of a layer from a file whose layers begin at `start`, into `room` if
/// they fill it. Nothing about them is verified.
pub(crate) fn read_runs(
    header: &Header,
    (file, start): (&File, u64),
    layer: usize,
    runs: &[Range<usize>],
    room: Option<Room>,
) -> Result<Layer, Problem> {
    let from = header.layout.layer * layer;
    let mut parts: Vec<(u64, usize)> = Vec::with_capacity(2 * runs.len());
    for place in header.layout.places(runs) {
        let offset = start + (from + place.start) as u64;
        match parts.last_mut() {
            // The values of the first tokens follow the keys of the last.
            Some((before, length)) if *before + *length as u64 == offset => *length += place.len(),
            _ => parts.push((offset, place.len())),
        }
    }
    Layer::gather(file, header.id.dtype, &parts, room)
        .map_err(|error| trouble(&error, header.bytes() as u64, from as u64))
}

/// Verifies a layer that is to be used: by the digests of its blocks, which are many times faster than its checksum.
pub(crate) fn check_quickly(header: &Header, layer: usize, data: &Layer) -> Result<(), Problem> {
    match &header.blocks {
        Some(blocks) => blocks.check(layer, std::slice::from_ref(&(0..header.id.tokens.len())), data),
        None => check_layer(header, layer, data),
    }
}

/// Verifies the checksum of a layer.
fn check_layer(header: &Header, layer: usize, data: &Layer) -> Result<(), Problem> {
    if blake3::hash(data.as_bytes()) == header.checksums[layer] {
        Ok(())
    } else {
        Err(Problem::Checksum(layer))
    }
}

/// Reads what follows the header and verifies it, layers and blocks, a layer at a time.
pub(crate) fn verify_layers(header: &Header, reader: &mut dyn Read) -> Result<(), Problem> {
    let mut layers = 0..header.id.layers;
    layers.try_for_each(|layer| next_layer(header, reader, layer, Room::new(header.layout.layer)).map(drop))
}
