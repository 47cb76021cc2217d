//! Looking after the store, and sharing it, through the program.

use super::*;

#[test]
fn chunks_can_be_looked_after() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    home.json(&["ingest", home.path("docs").to_str().unwrap()]);
    let listed = home.json(&["store", "ls"]);
    let chunks = listed["chunks"].as_array().unwrap();
    assert_eq!((chunks.len(), &chunks[0]["current_model"]), (2, &true.into()));
    let table = home.run(&["store", "ls"]).good().out;
    assert!(table.contains("Torque") && table.contains("2 chunks"), "{table}");
    let torque = chunks.iter().find(|chunk| chunk["label"] == "Torque").unwrap();
    let key = torque["key"].as_str().unwrap();
    let shown = home.run(&["store", "show", &key[..10]]).good().out;
    assert!(shown.contains(key) && shown.contains("tightened to 5 Nm"), "{shown}");
    assert!(home.json(&["store", "show", key])["text"].as_str().unwrap().contains("carbon paste"));
    let numerics = home.json(&["store", "show", key])["numerics"].as_str().unwrap().to_owned();
    assert!(numerics.starts_with("q8-") && shown.contains(&numerics), "{numerics} {shown}");
    home.run(&["store", "show", "zz"]).failed(1, &["zz"]);
    home.run(&["store", "rm", "0000000000000000"]).failed(1, &["0000000000000000"]);
    let verified = home.json(&["store", "verify"]);
    assert_eq!((&verified["whole"], verified["failed"].as_array().unwrap().len()), (&2.into(), 0));
    assert_eq!(home.json(&["store", "pin", &key[..12], "--keep", "30d"])["changed"], 1);
    let table = home.run(&["store", "ls"]).good().out;
    assert!(table.contains("pinned, 29 d more") || table.contains("pinned, 30 d more"), "{table}");
    let stats = home.json(&["store", "stats"]);
    assert_eq!((&stats["disk"]["chunks"], &stats["pinned"]["chunks"]), (&2.into(), &1.into()));
    // Chunks that are not pinned go when there is room for one alone.
    let half = stats["disk"]["bytes"].as_u64().unwrap() * 2 / 3;
    let archive = home.path("chunks.tar");
    assert_eq!(home.json(&["store", "export", archive.to_str().unwrap()])["chunks"], 2);
    let report = home.json(&["store", "gc", "--disk", &format!("{half}B")]);
    assert_eq!((&report["evicted"], &report["chunks"]), (&1.into(), &1.into()));
    assert_eq!(home.json(&["store", "import", archive.to_str().unwrap()])["chunks"], 1);
    // Another's are not seen, not even by their names.
    let other = |words: &[&str]| home.run(&[words, &["--credential", "sk-other"]].concat());
    assert!(other(&["store", "ls"]).good().out.contains("no chunks"));
    other(&["store", "show", &key[..12]]).failed(1, &[&key[..12]]);
    other(&["store", "rm", "--all", "--yes"]).good();
    other(&["store", "import", archive.to_str().unwrap()]).good();
    assert!(other(&["store", "ls"]).good().out.contains("2 chunks"));
    other(&["store", "rm", "--all", "--yes"]).good();
    assert_eq!(home.json(&["store", "ls"])["chunks"].as_array().unwrap().len(), 2);
    assert_eq!(home.json(&["store", "rm", &key[..12]])["removed"], 1);
    assert_eq!(home.chunk_files().len(), 1);
    assert!(home.run(&["store", "rm", "--all", "--yes"]).good().out.contains("removed 1 chunk"));
    assert!(home.run(&["store", "ls"]).good().out.contains("no chunks"));
}

/// `--keep` says until when chunks are pinned; with `--remove` it is a time to live alone.
#[test]
fn chunks_that_are_kept_for_a_time_are_pinned_until_it_is_over() {
    let home = home_with_documents();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, docs) = (model.to_str().unwrap().to_owned(), home.path("docs/chains.md"));
    home.json(&["ingest", docs.to_str().unwrap(), "--model", &model, "--prefix", "none"]);
    let pin = |more: &[&str]| home.run(&[&["store", "pin", "--all"], more].concat()).good().out;
    let group = |name: &str| home.json(&["store", "stats"])[name]["chunks"].as_u64().unwrap();
    let all = home.json(&["store", "stats"])["disk"]["chunks"].as_u64().unwrap();
    let gc = || home.json(&["store", "gc", "--disk", "1B"])["chunks"].as_u64().unwrap();
    assert!(pin(&["--keep", "30d"]).contains("pinned until their time is over"));
    assert_eq!((group("pinned"), group("expiring"), gc()), (all, all, all));
    assert!(pin(&["--keep", "never"]).contains("pinned without an end"));
    assert_eq!((group("pinned"), group("expiring")), (all, 0));
    assert!(pin(&["--remove", "--keep", "30d"]).contains("unpinned"));
    assert_eq!((group("pinned"), group("expiring"), gc()), (0, all, 0));
}

/// The reader of an archive needs all of it, unlike a person who has seen enough of a table.
#[test]
fn an_archive_whose_reader_dies_is_told_as_an_error() {
    let home = home_with_documents();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, docs) = (model.to_str().unwrap().to_owned(), home.path("docs/chains.md"));
    home.json(&["ingest", docs.to_str().unwrap(), "--model", &model, "--prefix", "none"]);
    let unread = |words: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Ran::of(home.command(words).stdout(writer).output().unwrap())
    };
    unread(&["store", "export", "-"]).failed(1, &["archive"]);
    assert_eq!(unread(&["store", "ls"]).good().err, "");
}

#[test]
fn what_is_no_archive_is_named() {
    let home = Home::new();
    for (name, content) in [("empty.tar", ""), ("text.tar", "This is no archive.")] {
        let file = home.write(name, content);
        home.run(&["store", "import", file.to_str().unwrap()])
            .failed(1, &[name, "the archive cannot be read", "one that `export` wrote"]);
    }
}

/// A store that is looked at is not made; a machine that has ingested nothing has an empty one.
#[test]
fn a_store_that_is_missing_is_told() {
    let home = Home::new();
    let missing = home.path("missing");
    for command in ["store stats", "store ls", "store verify", "store gc", "documents ls"] {
        let words: Vec<&str> = command.split(' ').collect();
        let named = [&words[..], &["--store", missing.to_str().unwrap()]].concat();
        home.run(&named).failed(1, &["there is no store at", "missing", "refrain ingest"]);
        home.run(&words).good();
        // No key is made to derive a namespace either.
        home.run(&[&words[..], &["--credential", "anna"]].concat()).good();
    }
    home.run(&["store", "export", "chunks.tar"]).failed(1, &["there is no store at"]);
    assert!(!missing.exists() && !home.path("data").exists());
}

/// Commands that look make nothing in a folder that is named by mistake.
#[test]
fn a_folder_without_a_store_is_left_as_it_is() {
    let home = Home::new();
    let (other, empty) = (home.write("other/notes.txt", "Bolts.").with_file_name(""), home.path("empty"));
    std::fs::create_dir(&empty).unwrap();
    let count = |folder: &Path| std::fs::read_dir(folder).unwrap().count();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for command in ["store stats", "store ls", "store verify", "store gc", "documents ls"] {
        let words: Vec<&str> = command.split(' ').collect();
        let run = |folder: &Path| home.run(&[&words[..], &["--store", folder.to_str().unwrap()]].concat());
        run(&other).failed(1, &["other", "holds no store", "refrain ingest", "--store"]);
        run(&empty).good();
        home.run(&[&words[..], &["--store", empty.to_str().unwrap(), "--credential", "anna"]].concat())
            .good();
    }
    let search = ["ask", "Why?", "--search", "--model", model.to_str().unwrap(), "--prefix", "none"];
    for words in [&["store", "export", "-"][..], &search] {
        let run = |folder: &Path| home.run(&[words, &["--store", folder.to_str().unwrap()]].concat());
        run(&other).failed(1, &["holds no store"]);
        run(&empty).failed(1, &["there is no store at"]);
    }
    assert_eq!((count(&other), count(&empty)), (1, 0));
}

/// Pipes and devices stay what they are, and so do links.
#[cfg(unix)]
#[test]
fn an_archive_goes_where_pipes_and_links_lead() {
    use std::os::unix::fs::FileTypeExt;
    let home = home_with_documents();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, docs) = (model.to_str().unwrap().to_owned(), home.path("docs/chains.md"));
    home.json(&["ingest", docs.to_str().unwrap(), "--model", &model, "--prefix", "none"]);
    let export = |file: &Path| home.command(&["store", "export", file.to_str().unwrap()]).output().unwrap();
    let imported = |archive: &[u8], name: &str| {
        let (file, store) = (home.write(name, archive), home.path(&format!("{name}-store")));
        let words = ["store", "import", file.to_str().unwrap(), "--store", store.to_str().unwrap()];
        home.json(&words)["chunks"].as_u64().unwrap()
    };
    let all = home.json(&["store", "stats"])["disk"]["chunks"].as_u64().unwrap();
    let stdout = export(Path::new("/dev/stdout"));
    assert_eq!(imported(&stdout.stdout, "stdout.tar"), all);
    assert!(String::from_utf8_lossy(&stdout.stderr).contains("exported"), "{stdout:?}");

    let pipe = home.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).unwrap()
    });
    Ran::of(export(&pipe)).good();
    assert!(pipe.metadata().unwrap().file_type().is_fifo());
    assert_eq!(imported(&reader.join().unwrap(), "pipe.tar"), all);

    for (link, target) in
        [("old.link", home.write("archives/old.tar", "old")), ("new.link", home.path("new.tar"))]
    {
        let link = home.path(link);
        std::os::unix::fs::symlink(&target, &link).unwrap();
        Ran::of(export(&link)).good();
        assert!(link.is_symlink());
        assert_eq!(imported(&std::fs::read(&target).unwrap(), "linked.tar"), all);
        std::fs::remove_dir_all(home.path("linked.tar-store")).unwrap();
    }
}

/// The files tell what the store holds where its index cannot be opened.
#[test]
fn chunks_are_counted_without_an_index() {
    let home = home_with_documents();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, docs) = (model.to_str().unwrap().to_owned(), home.path("docs/chains.md"));
    home.json(&["ingest", docs.to_str().unwrap(), "--model", &model, "--prefix", "none"]);
    let chunks = home.json(&["store", "stats"])["disk"]["chunks"].clone();
    let index = home.path("data/refrain/chunks/index.redb");
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    let ran = home.run(&["store", "stats", "--json"]).good();
    assert!(ran.err.contains("the files are counted"), "{}", ran.err);
    let disk = &serde_json::from_str::<Value>(&ran.out).unwrap()["disk"];
    assert!(disk["chunks"] == chunks && disk["bytes"].as_u64() > Some(1000), "{disk}");
}

/// Stores of different folders give one credential one namespace where a file gives them one key.
#[test]
fn a_file_gives_the_key_of_namespaces() {
    let home = home_with_documents();
    let (key, none) = (home.write("key", format!("{}\n", "5a".repeat(32))), home.write("none", "a secret"));
    let (key, none) = (key.to_str().unwrap(), none.to_str().unwrap());
    let listed = |file| home.run(&["store", "ls", "--credential", "sk-one", "--namespace-key-file", file]);
    listed(key).good();
    listed(none).failed(1, &[none, "64 hexadecimal digits", "openssl rand -hex 32"]);
    listed("/absent/key").failed(1, &["/absent/key"]);
    let alone = |file| home.run(&["store", "ls", "--namespace-key-file", file]);
    assert!(alone(key).good().err.contains("does nothing without --credential"));
    alone(none).failed(1, &[none, "64 hexadecimal digits"]);
    if !real_model() {
        return;
    }
    let namespaces = |more: &[&str]| {
        let folders = ["one", "two"].map(|folder| home.path(folder));
        folders.map(|store| {
            let (docs, store) = (home.path("docs/bolts.md"), store.to_str().unwrap().to_owned());
            let words = ["ingest", docs.to_str().unwrap(), "--credential", "sk-one", "--store", &store];
            home.json(&[&words[..], more].concat());
            home.json(&["store", "stats", "--store", &store])["namespaces"].as_object().unwrap().clone()
        })
    };
    let names = |found: &serde_json::Map<String, Value>| found.keys().cloned().collect::<Vec<_>>();
    let [one, two] = namespaces(&["--namespace-key-file", key]);
    assert!(names(&one).len() == 1 && names(&one) == names(&two));
    let [one, two] = namespaces(&[]);
    assert!(names(&one).len() == 2 && names(&one) != names(&two), "without it each has a key of its own");
}

/// Chunks that are named by their numerics are not those of other kernels, nor those that are not.
#[test]
fn strict_numerics_tell_kernels_apart() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let ingest = |more: &[&str]| {
        home.json(&[&["ingest", home.path("docs").to_str().unwrap()], more].concat())["computed"].clone()
    };
    assert_eq!((ingest(&[]), ingest(&[])), (2.into(), 0.into()));
    assert_eq!((ingest(&["--strict-numerics"]), ingest(&["--strict-numerics"])), (2.into(), 0.into()));
    let chunks = home.json(&["store", "ls"]);
    let keys: Vec<_> = chunks["chunks"].as_array().unwrap().iter().map(|chunk| &chunk["key"]).collect();
    assert_eq!(keys.len(), 4);
}

/// Chunks of the shared namespace are used by whom the configuration lets, and by nobody else; quotas are of namespaces.
#[test]
fn what_is_shared_is_read_where_it_is_allowed() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let docs = docs.to_str().unwrap();
    assert_eq!(home.json(&["ingest", docs, "--shared", "own"])["computed"], 2);
    let ingested = |more: &[&str]| home.json(&[&["ingest", docs, "--credential", "sk-one"], more].concat());
    assert_eq!(ingested(&["--shared", "read"])["computed"], 0);
    let ask = |more: &[&str]| {
        let words =
            ["ask", "--docs", docs, "--method", "pie", "--max-tokens", "4", "How tight is a stem bolt?"];
        home.json(&[&words, more].concat())["answers"][0].clone()
    };
    let shared = ask(&["--credential", "sk-one", "--shared", "read"]);
    assert_eq!(shared["stats"]["prefilled_chunks"], 0, "{shared}");
    // Where it is not allowed one has to compute one's own.
    assert_eq!(ingested(&[])["computed"], 2);
    assert_eq!(ask(&["--credential", "sk-one"])["tokens"], shared["tokens"]);
    let stats = home.json(&["store", "stats", "--quota", "1GiB,shared=1B"]);
    let namespaces = stats["namespaces"].as_object().unwrap();
    assert_eq!((namespaces.len(), &namespaces["shared"]["quota"]), (2, &1.into()));
    let table = home.run(&["store", "stats", "--quota", "1GiB,shared=1B"]).good().out;
    assert!(table.contains("of 1 B") && table.contains("of 1.0 GiB"), "{table}");
    // Only the namespace with too many goes.
    assert_eq!(
        home.json(&["store", "gc", "--quota", "1GiB,shared=1B"])["evicted"],
        namespaces["shared"]["chunks"]
    );
    assert_eq!(home.json(&["store", "stats"])["namespaces"].as_object().unwrap().len(), 1);
    // A bound that was meant in GiB removes nothing.
    home.run(&["store", "gc", "--disk", "50"]).failed(2, &["50 has no unit: give 50GiB or 50B"]);
    home.run(&["store", "gc", "--quota", "shared=lots"]).failed(2, &["shared=lots", "512MiB"]);
}

/// A machine reads the chunks that another has prefilled from an object store, here a folder; the answer is the same.
#[test]
fn machines_share_chunks_through_an_object_store() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let (docs, bucket, other) = (home.path("docs"), home.path("bucket"), home.path("other"));
    std::fs::create_dir(&bucket).unwrap();
    let remote = format!("file://{}", bucket.display());
    // Behind one prefix a chunk is the same at every place. A busy machine may be slow.
    let options = ["--prefix", "system", "--remote-policy", "fetch"];
    let words = |store: Option<&str>, method: &str| {
        let mut words =
            vec!["ask", "--docs", docs.to_str().unwrap(), "--method", method, "--remote", &remote];
        words.extend(options);
        words.extend(store.iter().flat_map(|folder| ["--store", folder]));
        words.extend(["--max-tokens", "8", "How tight is a stem bolt?"]);
        home.json(&words)["answers"][0].clone()
    };
    for method in ["a3", "sam_kv"] {
        let ingest = ["ingest", docs.to_str().unwrap(), "--method", method, "--remote", &remote];
        home.json(&[&ingest[..], &options].concat());
        let first = words(None, method);
        let second = words(other.to_str(), method);
        assert_eq!(second["stats"]["prefilled_chunks"], 0, "{second}");
        assert_eq!((&first["tokens"], &first["text"]), (&second["tokens"], &second["text"]));
    }
    // And from now on it has them itself.
    std::fs::remove_dir_all(&bucket).unwrap();
    let ingest = ["ingest", docs.to_str().unwrap(), "--store", other.to_str().unwrap()];
    let alone = home.json(&[&ingest[..], &options].concat());
    assert_eq!(alone["computed"], 0);
}
