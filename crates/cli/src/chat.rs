//! `refrain chat`: turn by turn at the terminal.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::Result;
use refrain::Library;
use refrain::engine::{Document, Engine, GenerateRequest, Instructions, Sampling};
use refrain::model::Message;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use serde_json::json;

use crate::args::{self, SEARCHABLE};
use crate::ask::{Sourced, answer, as_json, library, searched};
use crate::documents::read_documents;
use crate::ingest::ingest_to_answer;
use crate::limits::{check_biases, with_room};
use crate::methods::{self, Method, Policy};
use crate::output::{Fail, NotPrinted, count, paint, print_json, report};
use crate::settings::Context;
use crate::signals::{Interrupt, Interrupted, Interruptible};

const HELP: &str = "\
/docs PATH     answer from these documents too
/search N      answer each question from the N chunks that match it best, of these documents or, without any, of all that are
               stored; off ends that
/method NAME   answer with this method, for example /method a3:ratio=0.3
/evict NAME    decode with this eviction policy, for example /evict morph_kv:capacity=600
/new           forget what was said
/help          this list
/quit          leave; the end of input (Ctrl-D) does the same
Ctrl-C stops an answer. Arrow keys edit the line and bring earlier ones back.
";

/// Most bytes of keys and values that are kept of earlier turns.
const PREFIX_CACHE: usize = 1 << 30;

/// `refrain chat`
pub(crate) fn run(context: &Context, args: &args::Chat) -> Result<()> {
    let sampling = args.sampling.sampling();
    sampling.check()?;
    let (method, policy) = (methods::asked(context, &args.method)?, methods::policy(&args.evict)?);
    let documents = read_documents(context.console, &args.prompt.docs)?.documents;
    if args.search.is_some() && documents.is_empty() && context.lacks_store() {
        return Err(context.no_store());
    }
    let around = args.prompt.instructions();
    let engine = context.open_engine(&around)?.with_prefix_cache(PREFIX_CACHE);
    check_biases(&engine, &sampling)?;
    let speculative_tokens = args.speculation.num_speculative_tokens;
    let mut input = Input::open(io::stdin().is_terminal() && !context.json)?;
    let interrupt = input.interrupt()?;
    let mut chat = Chat {
        context,
        engine,
        method,
        policy,
        sampling,
        speculative_tokens,
        documents: Vec::new(),
        library: None,
        search: args.search,
        around,
    };
    chat.add(documents)?;
    let talking = matches!(input, Input::Person(_));
    if talking {
        context.say(&paint("2", &format!("{}. /help lists commands.", chat.state()), &io::stderr()));
    }
    while let Some(line) = input.line(context)? {
        match chat.turn(line.trim(), &interrupt.running()) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) if error.is::<Interrupted>() => context.say(&error.to_string()),
            // A person can try again and a script should stop. A closed standard output ends the chat.
            Err(error) if talking && !error.is::<NotPrinted>() => {
                report(&error, false);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The source of a chat's lines.
enum Input {
    /// A person, who edits them and brings earlier ones back.
    Person(Box<Editor<(), MemHistory>>),
    /// A script, whose lines are read as they are.
    Script(io::Lines<io::StdinLock<'static>>),
}

impl Input {
    fn open(is_person: bool) -> Result<Input> {
        if !is_person {
            return Ok(Input::Script(io::stdin().lock().lines()));
        }
        let config = Config::builder().auto_add_history(true).build();
        Ok(Input::Person(Box::new(Editor::with_history(config, MemHistory::new())?)))
    }

    /// Stops answers of a person's chat. A script's ends with the first Ctrl-C, as other programs do.
    fn interrupt(&self) -> io::Result<Interrupt> {
        match self {
            Input::Person(_) => Interrupt::listen(),
            Input::Script(_) => Ok(Interrupt::default()),
        }
    }

    /// The next line; none at the end of input, or after Ctrl-C twice.
    fn line(&mut self, context: &Context) -> Result<Option<String>> {
        let editor = match self {
            Input::Person(editor) => editor,
            Input::Script(lines) => return Ok(lines.next().transpose()?),
        };
        let prompt = ("> ", paint("1;36", "> ", &io::stdout()));
        let mut is_second = false;
        loop {
            match editor.readline(&prompt) {
                Ok(line) => return Ok(Some(line)),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) if is_second => return Ok(None),
                Err(ReadlineError::Interrupted) => context.say("Ctrl-D, /quit or another Ctrl-C leaves."),
                Err(error) => return Err(error.into()),
            }
            is_second = true;
        }
    }
}

/// The number of chunks that `/search` names, or none where it is `off`.
fn searched_chunks(text: &str) -> Result<Option<u32>> {
    if text == "off" {
        return Ok(None);
    }
    let number = text.parse().ok().filter(|number| SEARCHABLE.contains(&i64::from(*number)));
    let (least, most) = (SEARCHABLE.start(), SEARCHABLE.end());
    let wrong = || Fail::new(format!("{text} is no number of chunks: give {least} to {most}, or off"));
    Ok(Some(number.ok_or_else(wrong)?))
}

struct Chat<'a> {
    context: &'a Context,
    engine: Engine,
    method: Method,
    policy: Policy,
    sampling: Sampling,
    documents: Vec<Document>,
    /// The documents with their index, once a question was searched for in them.
    library: Option<Library>,
    /// Most chunks that a search brings for a question; none where all documents stand in the prompt.
    search: Option<u32>,
    around: Instructions,
    /// Most tokens that are proposed at a time.
    speculative_tokens: usize,
}

impl Chat<'_> {
    /// Takes a line; returns whether to go on. Ctrl-C stops an answer as soon as its line is taken.
    fn turn(&mut self, line: &str, running: &Interruptible<'_>) -> Result<bool> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            "" => {}
            "/quit" | "/exit" => return Ok(false),
            "/help" => self.context.say(HELP.trim_end()),
            "/new" => {
                self.around.history.clear();
                self.context.say("a new conversation");
            }
            "/method" if !rest.is_empty() => {
                self.method = methods::asked(self.context, rest.trim())?;
                self.ingest(&self.documents)?;
                self.context.say(&self.state());
            }
            "/evict" if !rest.is_empty() => {
                self.policy = methods::policy(rest.trim())?;
                self.context.say(&self.state());
            }
            "/docs" if !rest.is_empty() => {
                let paths = [PathBuf::from(rest.trim())];
                self.add(read_documents(self.context.console, &paths)?.documents)?;
                self.context.say(&self.state());
            }
            "/search" if !rest.is_empty() => {
                self.search = searched_chunks(rest.trim())?;
                self.ingest(&self.documents)?;
                self.context.say(&self.state());
            }
            "/method" | "/evict" | "/docs" | "/search" => self.context.say(&self.state()),
            _ if word.starts_with('/') => {
                self.context.say(&format!("there is no command {word}\n{}", HELP.trim_end()))
            }
            _ => self.ask(line, running)?,
        }
        Ok(true)
    }

    fn add(&mut self, documents: Vec<Document>) -> Result<()> {
        self.ingest(&documents)?;
        self.documents.extend(documents);
        self.library = None;
        Ok(())
    }

    /// Ingests documents that stand in the prompt whole; those that are searched are prefilled as far as answers draw on them.
    fn ingest(&self, documents: &[Document]) -> Result<()> {
        if self.search.is_none() && !documents.is_empty() && self.method.built.reuses() {
            let chunks = self.engine.chunks(documents)?;
            ingest_to_answer(self.context, &self.engine, &chunks, &self.method)?;
        }
        Ok(())
    }

    /// The chunks that match a question best, of the chat's documents or, without any, of those in the store. The store's documents are
    /// open for one question at a time, so that other programs can have them in between.
    fn searched(&mut self, question: &str, limit: usize) -> Result<Sourced> {
        let library = match self.library.take() {
            Some(library) => library,
            None => library(self.context, &self.engine, &self.documents)?,
        };
        let whole_documents = !self.method.built.statistics().is_empty();
        let sourced = searched(self.context, &library, question, limit, whole_documents)?;
        self.library = Some(library).filter(|_| !self.documents.is_empty());
        Ok(sourced)
    }

    fn ask(&mut self, question: &str, running: &Interruptible<'_>) -> Result<()> {
        let Sourced { chunks, sources } = match self.search {
            Some(limit) => self.searched(question, limit as usize)?,
            None => Sourced { chunks: self.engine.chunks(&self.documents)?, sources: None },
        };
        let prompt = self.engine.prompt_of_chunks(chunks, question, &self.around)?;
        if self.method.built.reuses() {
            self.engine.ingest_system(&prompt)?;
        }
        let request = GenerateRequest {
            eviction: self.policy.built.clone(),
            speculative_tokens: self.speculative_tokens,
            ..GenerateRequest::new(self.method.built.clone(), self.sampling.clone())
        };
        let shorter = match (self.around.history.is_empty(), self.search) {
            (true, None) => "ask a shorter question, or give fewer documents",
            (true, Some(_)) => "ask a shorter question, or search for fewer chunks with /search N",
            (false, _) => "/new forgets what was said",
        };
        let asked = (&self.method, &self.policy);
        let answer = answer(self.context, &self.engine, &prompt, asked, (&request, None), running)
            .map_err(|error| with_room(error, "--max-tokens", shorter))?;
        if self.context.json {
            let mut value = as_json(&self.method, &self.policy, &answer);
            if let Some(sources) = sources {
                value["sources"] = json!(sources);
            }
            print_json(&value)?;
        }
        let turn =
            |role: &str, content: String| Message { role: role.to_owned(), content, ..Message::default() };
        self.around.history.push(turn("user", question.to_owned()));
        self.around.history.push(turn("assistant", answer.text));
        Ok(())
    }

    fn state(&self) -> String {
        let documents = match (self.search, self.documents.len()) {
            (Some(_), 0) => "the stored documents".to_owned(),
            (_, given) => count(given, "document"),
        };
        let searched = self.search.map(|limit| format!(" searched for {}", count(limit as usize, "chunk")));
        let documents = documents + &searched.unwrap_or_default();
        let policy = if self.policy.built.is_full() { "" } else { &format!(", {}", self.policy.spec) };
        format!("{} with {}{policy}, {documents}", self.context.global.model, self.method.spec)
    }
}
