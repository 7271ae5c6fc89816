"""Message of each bad input, by the name of its case. `...` matches any text."""

MESSAGES = {
    "missing column": "source '...' has no column '...' for --label; available: ...",
    "unparsable row": (
        "source '...', line ..., column '...': '...' is not a number; ...fix or remove the line, or leave such "
        "rows out with --bad-rows skip"
    ),
    "fields missing": (
        "source '...', line ...: ... fields, but the header has ...; fix or remove the line, or leave such "
        "rows out with --bad-rows skip"
    ),
    "label outside": (
        "source '...', line ..., column '...': '...' is outside 0..1; if the column holds ratings, specify a "
        "condition such as --label '...'; fix or remove the line, or leave such rows out with --bad-rows skip"
    ),
    "empty file": "source '...' is empty; leave it out, or download it again",
    "header alone": "source '...' contains no rows; leave it out, or fetch it again",
    "too many columns": (
        "source '...': ... numeric and ... categorical features are too many for one dataset; dataset.json "
        "would have up to ... values in ... bytes, but may have ... in ..., which is enough for about 12,000 "
        "categorical or 122,000 numeric features. Leave columns out with --ignore, or select columns with a "
        "--schema file"
    ),
    "control character in a column": (
        "source '...': the name of column '...': it must not be empty or contain control characters; rename "
        "it, or leave the column out"
    ),
    "truncated gzip": "source '...' is truncated or damaged (...); fetch it again",
    "truncated parquet": "source '...' cannot be read (...); fetch it again",
    "archive of several files": (
        "source '...' is a zip archive with 2 files ('...', '...'), but must contain exactly one; unpack it "
        "and give the files in it"
    ),
    "encrypted archive": "source '...': '...' in this zip archive is encrypted; decrypt it",
    "archive by another method": (
        "source '...': '...' in this zip archive has compression method 14, but must be stored or deflated; unpack it"
    ),
    "tar archive": "source '...' is a tar archive, which is not supported; unpack it and give the files in it",
    "unread compression": (
        "source '...' is compressed with lz4, which is not supported; decompress it, or compress it with gzip, "
        "bz2, xz or zstd"
    ),
    "compressed twice": "source '...' is compressed twice; decompress it once",
    "compressed parquet": "source '...' contains compressed Parquet, which is not supported; decompress it",
    "xz of much memory": (
        "source '...' needs more than 256 MB for decompression; compress it with a smaller dictionary, such as "
        "that of xz -9"
    ),
    "zstd of much memory": (
        "source '...' was compressed by zstd with a window of more than 128 MB; compress it again with "
        "--long=27 or less"
    ),
    "lines of old macs": (
        "source '...' has lines that end with a carriage return alone, as on old Macs; convert them, for "
        "example with tr '...' '...'"
    ),
    "list of json": "source '...' is a single JSON list; write one object a line, as by jq -c '.[]'",
    "objects of several lines": (
        "source '...' has objects that span several lines; write one object a line, as by jq -c ."
    ),
    "row of no json": (
        "source '...', line ..., column ...: the row is not valid JSON (...); fix or remove the line, or leave "
        "such rows out with --bad-rows skip"
    ),
    "key of json twice": (
        "source '...', line ..., key '...' occurs twice; fix or remove the line, or leave such rows out with "
        "--bad-rows skip"
    ),
    "large integer of json": (
        "source '...', line ..., the integer ... needs more than 64 bits; write it as a string; fix or remove "
        "the line, or leave such rows out with --bad-rows skip"
    ),
    "object in a row": (
        "source '...', line ..., column '...' must be a single value, but is an object with '...'; write its "
        "values as keys of the row; fix or remove the line, or leave such rows out with --bad-rows skip"
    ),
    "category of other bytes": (
        "source '...', line ..., column '...': '...' is not UTF-8; name the encoding of the file with "
        "--encoding, or as encoding in a --schema file; fix or remove the line"
    ),
    "category of no encoding": (
        "source '...', line ..., column '...': the value has bytes that cp1252 does not define; name the "
        "encoding of the file with --encoding, or as encoding in a --schema file; fix or remove the line"
    ),
    "unknown encoding": (
        "encoding '...' is not a text encoding of Python; use one such as latin-1, cp1252, utf-16 or shift_jis"
    ),
    "encoding of host names": (
        "encoding '...' cannot decode files; use one such as latin-1, cp1252, utf-16 or shift_jis"
    ),
    "encoding of parquet": "prepare: an encoding is for text, but '...' is Parquet; remove the encoding",
    "fraction in a list": (
        "source '...', row ..., column '...': ... in a list is not a whole number; fix the row, or leave such "
        "rows out with --bad-rows skip"
    ),
    "whole numbers of no category": (
        "schema '...': key 'whole_numbers': column '...' is no category and not the group; list it under categorical"
    ),
    "number with a decimal comma": (
        "source '...', line ..., column '...': '...' is not a number, unless a --schema file specifies "
        'decimal: ","; fix or remove the line, or leave such rows out with --bad-rows skip'
    ),
    "sign of two meanings": "schema '...': key 'thousands': '...' is also the decimal sign; use another 'decimal'",
    "sign of several characters": (
        "schema '...': key 'decimal': '...' must be one character other than a letter, digit, sign, quote or line end"
    ),
    "space as decimal sign": "schema '...': key 'decimal': '...' must not be a space; use a comma or a point",
    "sign that is a digit": "schema '...': key 'strip': '...' has '...', which can be part of a number; remove it",
    "columns of two kinds": (
        "source '...': column '...' is ..., but ... in '...'; write both files with the same type, or leave "
        "the column out"
    ),
    "digits that doubles lose": (
        "source '...': column '...' is ..., but ... in '...'; ... has more digits than float64 keeps: write "
        "both files with the same type"
    ),
    "parquet text of other bytes": (
        "source '...', row ..., column '...': '...' is not valid UTF-8, as Parquet strings must be; fix the "
        "row, or leave such rows out with --bad-rows skip"
    ),
    "value outside its dictionary": (
        "source '...' cannot be read (a value is not in the dictionary of its column); fetch it again"
    ),
    "folder without files": (
        "source '...' is a folder without files, except for names that begin with _ or ., which are skipped; "
        "choose a folder with raw files"
    ),
    "dataset as a source": "source '...' is a dataset of ..., not a folder of raw files; train on it with data.dir",
    "key of a folder in the file": (
        "source '...' has column '...', but is also in folder '...'; rename one of them, or name the files "
        "instead of a folder, so that folders are no columns"
    ),
    "key of two folders": "source '...': two of its folders have a value for '...'; rename one",
    "folder of other bytes": "source '...': folder '...' is not valid UTF-8; rename it",
    "folder of no number": "source '...', folder '...': '...' is not a number; rename the folder",
    "folder as a list": "source '...': column '...' comes from a folder name, which is a single value and not a list",
    "rows without their folders": (
        "source '...' lacks '...'; the files of the earlier dataset were in folders '...=...'; use the folder "
        "that contains them"
    ),
    "keys as values": (
        "source '...' has ... different keys in ... sampled rows, but a row has only ... of them on average; "
        "store varying data as values instead of keys"
    ),
    "unknown key": "config '...': unknown key '...'; did you mean '...'?",
    "ill typed value": "config '...': key '...': input should be ..., got '...'",
    "number too long": "override '...: '...... is not a YAML value",
    "control character in a path": "config '...': key 'data.dir': it must have no control characters, got '...'",
    "batch too large": "config '...': key 'train.batch_size': input should be less than 2147483648, got ...",
    "initial rows too large": (
        "config '...': key 'embedding': init: scale must be at most 65504 for kind 'constant' and dtype "
        "float16, got ..."
    ),
    "near rows too large": "plan: table '...': cache_rows must be at most 9223372036854775807, got ...",
    "unknown width": "config '...': key 'checkpoint.bits': input should be 'exact', 'auto', 8, 4, 3 or 2, got ...",
    "bits of unknown table": "config: checkpoint.tables has '...', which is no sparse feature; did you mean '...'?",
    "no file of bits": "config '...': key 'checkpoint.tables': bits file '...': No such file or directory",
    "bits of doubles": (
        "config '...': checkpoint.bits and embedding.dtype 'float64' cannot be combined: float64 rows cannot "
        "be quantized; set checkpoint.bits to 'exact', or embedding.dtype to 'float32'"
    ),
    "two norms": (
        "config '...': train.clip_norm and dense.clip_norm cannot be combined: both clip dense gradients; leave one out"
    ),
    "pattern of no parameter": "config: dense.init '...' matches no parameter; did you mean '...'?",
    "no yaml": "config '...': it is not YAML: ...",
    "key given twice": "config '...': key '...' is given twice, again in line ...",
    "plan of other tables": "plan: the model has no table '...'; did you mean '...'?",
    "plan for other ranks": (
        "plan: it is for ... ranks, but this run has ...; create a plan for this number, or remove num_ranks "
        "and ranks from the plan"
    ),
    "no dataset": "dataset '...': cannot read dataset.json (...); make it with ...",
    "no source of rows": (
        "config '...': key 'data': neither data.dir nor data.service.url is set; set data.dir to a folder that "
        "... wrote, or data.service.url to the address of a dispatcher"
    ),
    "two sources of rows": (
        "config '...': key 'data': data.dir is '...' and data.service.url is '...', but rows are read from "
        "only one of them; set data.dir=null to use the readers, or data.service.url=null to use the folder"
    ),
    "no address of readers": (
        "config '...': key 'data.service.url': readers: an address must be grpc://HOST:PORT, or "
        "grpc+tls://HOST:PORT, got '...'"
    ),
    "no dispatcher": (
        "dispatcher grpc://... cannot be reached: ...; start it with ..., or set data.service.url to a running "
        "dispatcher"
    ),
    "no keys": (
        "config '...': key 'data.service': readers: 'grpc+tls://...': an encrypted address needs keys; set "
        "their folder with --keys DIR or data.service.keys=DIR (... creates one)"
    ),
    "keys that are not there": (
        "keys: '.../token' cannot be read (No such file or directory); copy it from the folder that ... has made"
    ),
    "readers of another host": (
        "readers: 'grpc://...': without keys an address must be on this machine, such as 127.0.0.1; create "
        "keys with ..., and set --keys DIR, or data.service.keys=DIR"
    ),
    "token that others read": "readers: '.../2.token' is a secret, but others may read it; chmod 600 .../2.token",
    "filter of many constants": (
        "filter '..., character ...: more than 4,096 constants; use fewer, or prepare a column that selects the rows"
    ),
    "split at readers": (
        "predict: the rows of run '...' come from the readers of grpc://..., but predicting a split needs its "
        "files; pass their folder with --data DIR, or raw files with --data FILE"
    ),
    "prepared column missing": "dataset file '...' has no column '...'; prepare the dataset again",
    "prepared file truncated": "dataset file '...' cannot be read (...); prepare the dataset again",
    "source of a recipe changed": (
        "source '...' has changed since the recipe was made: restore it, or make the recipe again with ..."
    ),
    "recipe of zipped files": (
        "source '...' is compressed, or not in UTF-8, so its rows can only be read in order and not shuffled: "
        "convert it and make the recipe again, prepare without --recipe-only, or set data.shuffle=false"
    ),
    "damaged recipe": "recipe '...' does not match the checksum in dataset.json; make the recipe again with ...",
    "prepared label outside": (
        "step ...: dataset file '...', row ...: 'label' must be in 0..1, got ...; fix the data, or prepare the "
        "dataset again (...)"
    ),
    "id outside": (
        "step ...: table '...': id ... from feature '...', sample ..., is outside 0...; set id_policy='hash' "
        "('drop', 'clamp'), enlarge num_embeddings, or fix the data (...)"
    ),
    "nan in dense": (
        "step ...: the loss is not finite, and nothing was updated: dense feature '...' of sample ... is nan; "
        "fix the data, or prepare it again (the last checkpoint is '...')"
    ),
    "loss without bound": (
        "step ...: the loss is ..., and nothing was updated; look for NaN or huge values in the dense inputs, "
        "or lower the learning rates (the last checkpoint is '...')"
    ),
    "damaged checkpoint": (
        "checkpoint file '...' must have ... bytes, but has ...; copy the checkpoint again, or use an older "
        "one: '...' is intact; the same command resumes from it after ..."
    ),
    "file that others need": (
        "checkpoint file '...' must have ... bytes, but has ...; copy the checkpoint again, or use an older "
        "one: '...' is intact; the same command resumes from it after ..., and the same for '...'"
    ),
    "partial checkpoint": (
        "checkpoint '...': manifest.json: No such file or directory; choose a folder step-...: '...' is "
        "intact; the same command resumes from it after ..."
    ),
    "checkpoint of another model": (
        "checkpoint '...': table '...' has embedding_dim ... there, but ... in the model; set it to ... in the "
        "model, or start without this checkpoint"
    ),
    "frozen table in a resumed run": (
        "checkpoint '...': table '...' was trained with row optimizer '...' (state: ...), but the model uses "
        "row optimizer 'frozen' (state: none); use the same row optimizer in the model with lr=0, which "
        "freezes its rows, or start without this checkpoint"
    ),
    "checkpoints out of reach": (
        "checkpoint '...' cannot be used (...); check the URL, the network and the credentials"
    ),
    "mirror out of reach": "checkpoint '...' cannot be used (...); check the URL, the network and the credentials",
    "mirror of another run": (
        "checkpoint.mirror '...' holds checkpoints of another run: the newest there is step ... of run ..., "
        "and this is run ... at step ...; choose another checkpoint.mirror, or move its checkpoints away"
    ),
    "checkpoints at no url": (
        "config '...': key 'checkpoint': dir must be a URL such as s3://bucket/run or file:///folder, got '...'"
    ),
    "checkpoints moved": (
        "run_dir '...' has its checkpoints at '...', and there are none at '...'; copy them there, set "
        "checkpoint.dir back, or choose another run_dir"
    ),
    "run on other data": (
        "run_dir '...' was trained on other data than those of '...': dense column '...': mean, which was ... "
        "and is ... now; choose another run_dir, or start from the beginning with --force"
    ),
    "run in use": (
        "run_dir '...' is in use: process ... on ... trains in it; wait until it has ended, stop it, or choose "
        "another run_dir"
    ),
    "not a run": "'...' is not a run: it has no config.yaml; pass the run_dir of a training",
    "unwritable run dir": "run_dir '...' cannot be written: ...; free space there, or choose another",
    "unwritable predictions": "predictions '...' cannot be written: ...; choose another file",
    "output column of no name": (
        "predict: --columns '...' lacks a name; use NEW=OLD, or NAME to keep the name of a column"
    ),
    "output columns of one name": (
        "predict: --columns has two columns with the name '...'; rename one, for example '...'"
    ),
    "unknown output column": (
        "keys: '...' has no column '...'; ..., or keep it when preparing the data; the column of predictions is '...'"
    ),
    "unknown output label": "predict: --columns has the unknown column '...'; did you mean '...'?",
    "key that doubles lose": "keys: source '...', from row ... on, column '...': ...; leave the column out",
    "key without a column": "predict: --keys has '...', but --columns does not; add it to --columns",
    "unseen values": (
        "predict: ...% of the ... values of '...' are unseen (test split: ...%); check that the files spell "
        "values like the training files (encoding, number format, prefixes), or predict with --allow-unseen"
    ),
    "option of raw files": "predict: --allow-unseen needs raw files in --data; omit it",
    "no step to profile": (
        "--profile: this run has done its ... steps, so no step is left to profile; raise ..., choose another "
        "run_dir, or start from the beginning with --force"
    ),
    "other steps to profile": (
        "--profile-steps ... is outside of this run, which does steps ... to ...; choose some of these"
    ),
    "steps to profile ill typed": "--profile-steps must be FIRST:LAST, as 101:110, got '...'",
    "folder for a timeline": "--profile: '...' must not be a folder; move it away",
    "advice on codes": (
        "checkpoint advise: ... has quantized rows itself; choose a run that has ended, or whose last "
        "checkpoint is exact"
    ),
    "no export": (
        "export '...': cannot read export.json: No such file or directory; choose a folder that ... of this "
        "version wrote in format safetensors or numpy"
    ),
    "export of another version": (
        "export '...': format of export.json must be '...', got '...'; import the folder with the version that wrote it"
    ),
    "malformed export": "export '...': export.json is malformed (...); export again",
    "export without states": (
        "import: export '...' has no optimizer states; export the checkpoint again with --states, or import "
        "without --states"
    ),
    "export of some tables": (
        "export '...': table '...' is missing in the export, which has ...; give model and export the same "
        "tables, or start without this export"
    ),
    "damaged export": "export file '...' does not match its manifest (...); export again",
    "export with other moments": (
        "export '...': dense tensor '...' belongs to no parameter of the model and its optimizer; use the "
        "config that it was trained with, or import without --states"
    ),
    "export by another name": "import: '...' is an export of ...; use --from meseta",
    "checkpoints too slow": (
        "checkpoint.max_bytes_per_s is ..., but must be at least ... per rank, ... in total, because a slower "
        "rank is reported as stuck (comm.stall_timeout_s is ...); raise it, or remove it"
    ),
    "no records of ranks": (
        "'...' has no records of ranks in 'ranks'; give the run_dir of a training on several ranks, on a file "
        "system of its hosts"
    ),
    "foreign record of a rank": (
        "rank record '...': its first bytes are not those of a rank record; the file is damaged or no rank "
        "record, move it away"
    ),
    "limit without a disk": "calibrate: --max-reads-per-s needs a disk; name a folder on it with --disk",
    "topology without memory": (
        "topology file '...': hbm_bytes is missing, so no plan can be checked against the memory of its ranks; "
        "add the bytes of DRAM that each rank may fill, or let ... write the file"
    ),
}
